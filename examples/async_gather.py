"""LMDeploy's program on concurrency with coroutines; only imports, model and the bound on new tokens are changed."""
# ruff: noqa: I001

import asyncio
from corogen import pipeline, GenerationConfig, PytorchEngineConfig

event_loop = asyncio.new_event_loop()
asyncio.set_event_loop(event_loop)

model_path = "demo"
pipe = pipeline(model_path, backend_config=PytorchEngineConfig())


async def _gather_output():
    tasks = [
        pipe.async_batch_infer("Hakuna Matata", GenerationConfig(max_new_tokens=48)),
        pipe.async_batch_infer("giraffes are heartless creatures", GenerationConfig(max_new_tokens=48)),
    ]
    return await asyncio.gather(*tasks)


output = asyncio.run(_gather_output())
print(output[0].text)
print(output[1].text)
