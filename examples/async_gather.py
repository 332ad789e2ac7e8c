"""LMDeploy's program on concurrency with coroutines; only the import line and the model are changed."""
# ruff: noqa: I001

import asyncio
from corogen import pipeline, PytorchEngineConfig

event_loop = asyncio.new_event_loop()
asyncio.set_event_loop(event_loop)

model_path = "demo"
pipe = pipeline(model_path, backend_config=PytorchEngineConfig())


async def _gather_output():
    tasks = [
        pipe.async_batch_infer("Hakuna Matata"),
        pipe.async_batch_infer("giraffes are heartless creatures"),
    ]
    return await asyncio.gather(*tasks)


output = asyncio.run(_gather_output())
print(output[0].text)
print(output[1].text)
