"""Plain synchronous code: one prompt, a list, a stream, a conversation."""

from corogen import GenerationConfig, pipeline

short = GenerationConfig(max_new_tokens=48)

with pipeline("demo") as pipe:
    print(pipe.infer("Hakuna Matata", short).text)

    for answer in pipe.infer(["Name three colours.", "Name three animals."], short):
        print(answer.index, answer.text)

    for piece in pipe.stream_infer("Tell me a story.", short):
        print(piece.text, end="", flush=True)
    print()

    chat = pipe.session()
    print(pipe.chat("What is the capital of France?", session=chat, gen_config=short).text)
    print(pipe.chat("And of Japan?", session=chat, gen_config=short).text)
