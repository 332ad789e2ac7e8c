"""A service of your own: routes await the pipeline, and a client that disconnects ends its request.

pip install fastapi uvicorn
uvicorn --app-dir examples fastapi_app:app
curl -G localhost:8000/ask -d "question=What is the capital of France?"
"""

import asyncio
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from corogen import GenerationConfig, InvalidRequest, QueueFullError, pipeline


@asynccontextmanager
async def lifespan(app: FastAPI):
    async with pipeline("demo", queue_size=256) as app.state.pipe:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/ask")
async def ask(request: Request, question: str, max_new_tokens: int = 64):
    """The whole answer."""
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    task = asyncio.create_task(app.state.pipe.async_batch_infer(question, config))
    watcher = asyncio.create_task(cancel_on_disconnect(request, task))
    try:
        await asyncio.wait([task])
    finally:
        watcher.cancel()
        task.cancel()
    return Response(status_code=499) if task.cancelled() else {"text": task.result().text}


@app.get("/stream")
async def stream(question: str, max_new_tokens: int = 64):
    """The answer while it is generated. A bad question raises here, before the response begins."""
    pieces = app.state.pipe.async_stream_infer(question, GenerationConfig(max_new_tokens=max_new_tokens))

    async def texts():
        async with pieces:
            async for piece in pieces:
                yield piece.text

    return StreamingResponse(texts(), media_type="text/plain; charset=utf-8")


@app.exception_handler(InvalidRequest)
async def bad_request(request: Request, error: InvalidRequest):
    return JSONResponse({"error": error.code, "message": str(error)}, status_code=400)


@app.exception_handler(QueueFullError)
async def too_many(request: Request, error: QueueFullError):
    return JSONResponse({"error": error.code, "message": str(error)}, status_code=429, headers={"Retry-After": "1"})


async def cancel_on_disconnect(request: Request, task: asyncio.Task):
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()
