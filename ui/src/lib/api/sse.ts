export interface SseMessage {
  id?: string;
  event?: string;
  data: string;
}

/**
 * Parses a server-sent event stream. `EventSource` cannot send an Authorization header, so the
 * stream is read with `fetch`. Chunks may split anywhere, also inside a UTF-8 character or a CRLF.
 */
export async function* readSse(body: ReadableStream<Uint8Array>): AsyncGenerator<SseMessage> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = '';
  let message: { id?: string; event?: string; data: string[] } = { data: [] };
  try {
    for (;;) {
      const { done, value } = await reader.read();
      buffer += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A trailing CR may be the first half of a CRLF: wait for the next chunk.
      const complete = done || !buffer.endsWith('\r') ? buffer.length : buffer.length - 1;
      const lines = buffer.slice(0, complete).split(/\r\n|\n|\r/);
      buffer = (lines.pop() ?? '') + buffer.slice(complete);
      for (const line of lines) {
        if (line === '') {
          if (message.data.length > 0) yield { ...message, data: message.data.join('\n') };
          message = { data: [] };
          continue;
        }
        const colon = line.indexOf(':');
        if (colon === 0) continue;
        const field = colon < 0 ? line : line.slice(0, colon);
        const text = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
        if (field === 'data') message.data.push(text);
        else if (field === 'id') message.id = text;
        else if (field === 'event') message.event = text;
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
