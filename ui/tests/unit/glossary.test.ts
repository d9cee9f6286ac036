import { readFileSync } from 'node:fs';
import { expect, it } from 'vitest';
import { CHINESE } from '../../src/features/training/glossary.zh';

it('explains every metric of the trainer in Chinese', () => {
  const source = readFileSync('../crates/core/src/glossary.rs', 'utf8');
  const names = [...source.matchAll(/^\s+name: "(\w+)"/gm)].map((found) => found[1]);
  expect(names.length).toBeGreaterThan(20);
  expect(Object.keys(CHINESE).sort()).toEqual(names.sort());
});
