"""Threads that submit, and futures that bring the answers as they come."""

from concurrent.futures import ThreadPoolExecutor, as_completed

from corogen import GenerationConfig, pipeline

short = GenerationConfig(max_new_tokens=48)

with pipeline("demo") as pipe, ThreadPoolExecutor(4) as threads:
    questions = [f"What is {n} plus {n}?" for n in range(8)]
    futures = list(threads.map(lambda question: pipe.submit(question, short), questions))
    for future in as_completed(futures):
        print(future.result().text)
