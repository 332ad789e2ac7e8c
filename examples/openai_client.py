"""OpenAI's own client against `corogen serve`: whole answers, a stream, many at once.

corogen serve demo     # in another terminal; then: python examples/openai_client.py
"""

import asyncio
import os

from openai import AsyncOpenAI, OpenAI

server = {"base_url": os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), "api_key": "none"}


def ask(question):
    return {"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}


with OpenAI(**server) as client:
    print(client.chat.completions.create(**ask("What is the capital of France?")).choices[0].message.content)

    for chunk in client.chat.completions.create(**ask("Name three colours."), stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


async def main():
    async with AsyncOpenAI(**server) as client:
        questions = [f"What is {n} plus {n}?" for n in range(4)]
        answers = await asyncio.gather(*(client.chat.completions.create(**ask(question)) for question in questions))
        for answer in answers:
            print(answer.choices[0].message.content)


asyncio.run(main())
