"""Threads that talk through queues, on `QueueAdapter`: nothing polls, and the program ends by itself."""

import threading
from queue import Queue

from corogen import GenerationConfig, pipeline
from corogen.adapters import QueueAdapter


def client(inbox, outbox, message):
    inbox.put(message)
    print(outbox.get().text)


pairs = [(Queue(), Queue()), (Queue(), Queue())]
messages = ["Hakuna Matata", "giraffes are heartless creatures"]
short = GenerationConfig(max_new_tokens=48)

with pipeline("demo") as pipe, QueueAdapter(pipe, short) as bridge:
    for inbox, outbox in pairs:
        bridge.add(inbox, outbox)
    clients = [
        threading.Thread(target=client, args=(*pair, message)) for pair, message in zip(pairs, messages, strict=True)
    ]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
