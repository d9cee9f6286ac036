import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';

type Entry = string | { match: Record<string, string> }[];
const read = (locale: string) =>
  JSON.parse(readFileSync(`messages/${locale}.json`, 'utf8')) as Record<string, Entry>;

const en = read('en');
const zh = read('zh-CN');
const keys = (messages: Record<string, Entry>) =>
  Object.keys(messages).filter((key) => key !== '$schema');
const texts = (entry: Entry) =>
  typeof entry === 'string' ? [entry] : entry.flatMap(({ match }) => Object.values(match));
const inputs = (entry: Entry) =>
  new Set(
    texts(entry).flatMap((text) => [...text.matchAll(/\{(\w+)\}/g)].map((found) => found[1])),
  );

function sources(directory: string): string[] {
  return readdirSync(directory, { withFileTypes: true }).flatMap((item) => {
    const path = join(directory, item.name);
    if (item.isDirectory()) return item.name === 'paraglide' ? [] : sources(path);
    return /\.(svelte|ts)$/.test(item.name) ? [readFileSync(path, 'utf8')] : [];
  });
}

describe('messages', () => {
  it('exist in both languages', () => {
    expect(keys(zh).sort()).toEqual(keys(en).sort());
  });

  it('take the same inputs in both languages', () => {
    for (const key of keys(en))
      expect([key, [...inputs(zh[key]!)].sort()]).toEqual([key, [...inputs(en[key]!)].sort()]);
  });

  it('are neither empty nor left in English', () => {
    for (const key of keys(zh)) {
      for (const text of texts(zh[key]!))
        expect([key, /\p{Script=Han}|^[A-Z{]/u.test(text)]).toEqual([key, true]);
    }
  });

  it('are all used', () => {
    const used = new Set(
      sources('src').flatMap((text) =>
        [...text.matchAll(/\bm\.([a-z_0-9]+)/g)].map((found) => found[1]),
      ),
    );
    expect(keys(en).filter((key) => !used.has(key))).toEqual([]);
  });
});
