import { describe, expect, it } from 'vitest';
import { readSse } from '../../src/lib/api/sse';

function stream(chunks: Uint8Array[]): ReadableStream<Uint8Array> {
  return new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
}

async function read(chunks: Uint8Array[]) {
  const out = [];
  for await (const message of readSse(stream(chunks))) out.push(message);
  return out;
}

const TEXT =
  ': comment\r\nid: 7\r\nevent: step\r\ndata: {"a":"喵"}\r\n\r\ndata: one\ndata: two\n\ndata:bare\r\rdata: cut';

describe('server-sent events', () => {
  it('reads ids, names, several data lines and every line end', async () => {
    expect(await read([new TextEncoder().encode(TEXT)])).toEqual([
      { id: '7', event: 'step', data: '{"a":"喵"}' },
      { data: 'one\ntwo' },
      { data: 'bare' },
    ]);
  });

  it('gives the same whatever the chunk borders', async () => {
    const bytes = new TextEncoder().encode(TEXT);
    const whole = await read([bytes]);
    for (let cut = 1; cut < bytes.length; cut += 1) {
      expect(await read([bytes.slice(0, cut), bytes.slice(cut)])).toEqual(whole);
    }
    expect(await read([...bytes].map((byte) => Uint8Array.of(byte)))).toEqual(whole);
  });
});
