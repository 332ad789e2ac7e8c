"""The engine on your own loop, without the extra thread: everything here is one asyncio program."""

import asyncio

from corogen import Engine, EngineConfig, GenerationConfig


async def main():
    short = GenerationConfig(max_new_tokens=48)
    async with Engine("demo", EngineConfig(max_batch_size=8)) as engine:
        answers = await asyncio.gather(*(engine.generate(f"What is {n} plus {n}?", short) for n in range(4)))
        for answer in answers:
            print(answer.text)

        async with engine.stream("Tell me a story.", short) as pieces:
            async for piece in pieces:
                print(piece.text, end="", flush=True)
        print()


asyncio.run(main())
