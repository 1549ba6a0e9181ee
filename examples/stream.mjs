// Speech to text with fetch alone: node examples/stream.mjs http://127.0.0.1:8000 talk.wav
// A browser imports transcribe(). Triton sends no CORS headers: let a proxy serve it with the page.

/** Yields the text so far after each 0.64 s of `pcm`, an Int16Array of mono samples. */
export async function* transcribe(url, pcm, sampleRate = 16000) {
  const step = Math.round(0.64 * sampleRate);
  const id = 1 + Math.floor(Math.random() * Number.MAX_SAFE_INTEGER);
  for (let start = 0; start < pcm.length; start += step) {
    const chunk = Array.from(pcm.subarray(start, start + step));
    const flags = { sequence_start: start === 0, sequence_end: start + step >= pcm.length };
    const options = start === 0 ? { sample_rate: sampleRate } : {};
    const response = await fetch(`${url}/v2/models/oasr_streaming/infer`, {
      method: "POST",
      body: JSON.stringify({
        parameters: { sequence_id: id, ...flags, ...options },
        inputs: [{ name: "PCM16", datatype: "INT16", shape: [1, chunk.length], data: chunk }],
      }),
    });
    const reply = await response.json();
    if (!response.ok) throw new Error(reply.error);
    yield reply.outputs.find((output) => output.name === "TRANSCRIPTS").data[0];
  }
}

/** The samples of a PCM16 WAV: its chunk "data", behind chunks of any other kind. */
function readWav(bytes) {
  const view = new DataView(bytes.buffer);
  const size = (at) => view.getUint32(at + 4, true);
  let at = 12;
  while (view.getUint32(at) !== 0x64617461) at += 8 + size(at) + (size(at) % 2);
  return new Int16Array(bytes.buffer.slice(at + 8, at + 8 + size(at)));
}

if (globalThis.process?.argv[1]?.endsWith("stream.mjs")) {
  const { readFile } = await import("node:fs/promises");
  const [url, path] = process.argv.slice(2);
  const pcm = readWav(new Uint8Array(await readFile(path)));
  for await (const text of transcribe(url, pcm)) console.log(text);
}
