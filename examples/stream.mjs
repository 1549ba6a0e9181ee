// Speech to text with fetch alone: node examples/stream.mjs http://127.0.0.1:8000 talk.wav
// A browser imports transcribe(). Triton sends no CORS headers: let a proxy serve it with the page.

/** Yields the text so far after each 0.64 s of `pcm`, an Int16Array; the server takes mono only. */
export async function* transcribe(url, pcm, { sampleRate = 16000, channels = 1 } = {}) {
  const step = Math.round(0.64 * sampleRate);
  const id = 1 + Math.floor(Math.random() * Number.MAX_SAFE_INTEGER);
  for (let start = 0; start < pcm.length; start += step) {
    const chunk = Array.from(pcm.subarray(start, start + step));
    const flags = { sequence_start: start === 0, sequence_end: start + step >= pcm.length };
    const options = start === 0 ? { sample_rate: sampleRate, channels } : {};
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

/** The content of each chunk of a RIFF file, by name. */
function readChunks(bytes) {
  const view = new DataView(bytes.buffer);
  const chunks = {};
  for (let at = 12, size; at + 8 <= bytes.length; at += 8 + size + (size % 2)) {
    size = view.getUint32(at + 4, true);
    chunks[String.fromCharCode(...bytes.subarray(at, at + 4))] = bytes.slice(at + 8, at + 8 + size);
  }
  return chunks;
}

/** Samples, rate and channels of a PCM16 WAV. */
function readWav(bytes) {
  const { "fmt ": format, data } = readChunks(bytes);
  if (!(format?.length >= 16 && data)) throw new Error("no WAV file; convert it to a PCM16 WAV");
  const view = new DataView(format.buffer);
  const isExtensible = view.getUint16(0, true) === 0xfffe && format.length >= 26;
  const [kind, bits] = [view.getUint16(isExtensible ? 24 : 0, true), view.getUint16(14, true)];
  if (kind !== 1 || bits !== 16)
    throw new Error(`WAV format ${kind} with ${bits}-bit samples; convert it to PCM16 (1, 16-bit)`);
  const pcm = new Int16Array(data.buffer, 0, Math.floor(data.length / 2));
  return { pcm, sampleRate: view.getUint32(4, true), channels: view.getUint16(2, true) };
}

if (globalThis.process?.argv[1]?.endsWith("stream.mjs")) {
  const { readFile } = await import("node:fs/promises");
  const [url, path] = process.argv.slice(2);
  const { pcm, ...format } = readWav(new Uint8Array(await readFile(path)));
  for await (const text of transcribe(url, pcm, format)) console.log(text);
}
