"""Speech to text with asyncio: python examples/stream_asyncio.py 127.0.0.1:8001 talk.wav"""

import asyncio
import sys
import uuid
import wave

import numpy as np
import tritonclient.grpc.aio as triton

url, path = sys.argv[1:]
with wave.open(path) as wav:
    if wav.getsampwidth() != 2:
        sys.exit(f"{path}: {8 * wav.getsampwidth()}-bit samples; convert them to PCM16")
    options = {"sample_rate": wav.getframerate(), "channels": wav.getnchannels()}
    pcm = np.frombuffer(wav.readframes(wav.getnframes()), np.int16)
chunks = [pcm[start : start + 10240] for start in range(0, pcm.size, 10240)]  # 0.64 s at 16 kHz


async def requests():
    """Yields chunks, here all at once; with a microphone it would await each.

    tritonclient hides errors that are raised in here: read and check the file before the stream.
    """
    stream_id = str(uuid.uuid4())
    for number, chunk in enumerate(chunks, start=1):
        audio = triton.InferInput("PCM16", [1, chunk.size], "INT16")
        audio.set_data_from_numpy(chunk[None])
        yield {
            "model_name": "oasr_streaming",
            "inputs": [audio],
            "sequence_id": stream_id,
            "sequence_start": number == 1,
            "sequence_end": number == len(chunks),
            "parameters": options if number == 1 else None,
        }


async def main():
    async with triton.InferenceServerClient(url) as client:
        async for reply, error in client.stream_infer(requests()):
            if error:
                raise error
            print(reply.as_numpy("TRANSCRIPTS")[0].decode())


asyncio.run(main())
