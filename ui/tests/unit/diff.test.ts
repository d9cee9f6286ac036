import { describe, expect, it } from 'vitest';
import { diff, tokenize } from '../../src/lib/text/diff';

const apply = (parts: ReturnType<typeof diff>, drop: 'added' | 'removed') =>
  parts
    .filter((part) => part.kind !== drop)
    .map((part) => part.text)
    .join('');

describe('diff', () => {
  it('rebuilds both texts from its parts', () => {
    const cases: [string, string][] = [
      ['', ''],
      ['', 'new'],
      ['old', ''],
      ['Certainly! I renamed it in 7 files.', 'Renamed in 7 files.'],
      ['a b c d e', 'a c d x e'],
      ['明天下午有两个会议。', '明天上午有一个会议。'],
      ['line one\nline two\n', 'line one\n\nline 2\n'],
    ];
    for (const [before, after] of cases) {
      const parts = diff(before, after);
      expect(apply(parts, 'added')).toBe(before);
      expect(apply(parts, 'removed')).toBe(after);
    }
  });

  it('marks only what changed', () => {
    expect(diff('keep this word', 'keep that word')).toEqual([
      { kind: 'same', text: 'keep ' },
      { kind: 'removed', text: 'this' },
      { kind: 'added', text: 'that' },
      { kind: 'same', text: ' word' },
    ]);
  });

  it('joins changes that only a space keeps apart', () => {
    expect(diff('it was a red old car', 'it was a blue new car')).toEqual([
      { kind: 'same', text: 'it was a ' },
      { kind: 'removed', text: 'red old' },
      { kind: 'added', text: 'blue new' },
      { kind: 'same', text: ' car' },
    ]);
  });

  it('does not scatter two texts that have little in common', () => {
    const parts = diff(
      'The header names the column, and values lie between 18 and 24.',
      'Six words, and no more.',
    );
    expect(parts.map((part) => part.kind)).toEqual(['removed', 'added']);
  });

  it('compares Chinese by the character', () => {
    expect(tokenize('两个会议')).toEqual(['两', '个', '会', '议']);
    expect(diff('两个会议', '三个会议')[0]).toEqual({ kind: 'removed', text: '两' });
  });

  it('replaces a middle that is too long to search, and stays correct', () => {
    const before = `start ${'a '.repeat(3000)}end`;
    const after = `start ${'b '.repeat(3000)}end`;
    const parts = diff(before, after);
    expect(apply(parts, 'added')).toBe(before);
    expect(apply(parts, 'removed')).toBe(after);
  });
});
