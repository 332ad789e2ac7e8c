"""The same pipeline under trio. A cancelled scope cancels its request. Needs `pip install trio`."""

import trio

from corogen import GenerationConfig, pipeline

pipe = pipeline("demo")


async def ask(question):
    answer = await pipe.async_batch_infer(question, GenerationConfig(max_new_tokens=48))
    print(answer.text)


async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "Hakuna Matata")
        nursery.start_soon(ask, "What is the capital of France?")

    with trio.move_on_after(0.5):
        async with pipe.async_stream_infer(
            "Tell me a very long story.", GenerationConfig(max_new_tokens=None)
        ) as story:
            async for piece in story:
                print(piece.text, end="", flush=True)
    print()


trio.run(main)
pipe.close()
