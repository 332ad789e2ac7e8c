"""LMDeploy's program on threads with queues; only the import line and the model are changed.

Its server polls, and its loop never ends, so neither does this program: stop it with Ctrl-C, twice. Its answers have up
to 512 tokens, so the first may take a minute on a CPU. `threads_queue_adapter.py` is the same application without all
that.
"""
# ruff: noqa: B905, I001, RUF006

import threading
from queue import Queue
import asyncio
from corogen import pipeline, PytorchEngineConfig

model_path = "demo"


async def _batch_infer(inque: Queue, outque: Queue, pipe):
    while True:
        if inque.empty():
            await asyncio.sleep(0)
            continue

        input = inque.get_nowait()
        output = await pipe.async_batch_infer(input)
        outque.put(output)


def server(inques, outques):
    event_loop = asyncio.new_event_loop()
    asyncio.set_event_loop(event_loop)
    pipe = pipeline(model_path, backend_config=PytorchEngineConfig())
    for inque, outque in zip(inques, outques):
        event_loop.create_task(_batch_infer(inque, outque, pipe))
    event_loop.run_forever()


def client(inque, outque, message):
    inque.put(message)
    print(outque.get().text)


inques = [Queue(), Queue()]
outques = [Queue(), Queue()]

t_server = threading.Thread(target=server, args=(inques, outques))
t_client0 = threading.Thread(target=client, args=(inques[0], outques[0], "Hakuna Matata"))
t_client1 = threading.Thread(target=client, args=(inques[1], outques[1], "giraffes are heartless creatures"))

t_server.start()
t_client0.start()
t_client1.start()

t_client0.join()
t_client1.join()
