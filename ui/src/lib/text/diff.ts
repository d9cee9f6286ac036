export interface DiffPart {
  kind: 'same' | 'added' | 'removed';
  text: string;
}

/** Above this many word pairs the common middle is not searched; the whole middle is replaced. */
const LIMIT = 4_000_000;

/**
 * Words, runs of space and single marks. Chinese and Japanese have no spaces between words, so each
 * of their characters is a unit of its own.
 */
export function tokenize(text: string): string[] {
  return (
    text.match(
      /\s+|[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu,
    ) ?? []
  );
}

/** The shortest edit from one text to another, by words (longest common subsequence). */
export function diff(before: string, after: string): DiffPart[] {
  const a = tokenize(before);
  const b = tokenize(after);
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head += 1;
  let tail = 0;
  while (
    tail < a.length - head &&
    tail < b.length - head &&
    a[a.length - 1 - tail] === b[b.length - 1 - tail]
  ) {
    tail += 1;
  }
  const parts: DiffPart[] = [];
  const push = (kind: DiffPart['kind'], text: string) => {
    if (!text) return;
    const last = parts.at(-1);
    if (last?.kind === kind) last.text += text;
    else parts.push({ kind, text });
  };
  push('same', a.slice(0, head).join(''));
  const left = a.slice(head, a.length - tail);
  const right = b.slice(head, b.length - tail);
  if (left.length * right.length > LIMIT) {
    push('removed', left.join(''));
    push('added', right.join(''));
  } else {
    middle(left, right, push);
  }
  push('same', tail > 0 ? a.slice(a.length - tail).join('') : '');
  return calm(parts);
}

/** Below this share of kept text, single kept words only scatter the change. */
const KEPT = 0.4;

/**
 * Makes the edit readable: changes that only a space keeps apart become one change, and texts that
 * have little in common are shown one after the other.
 */
function calm(parts: DiffPart[]): DiffPart[] {
  const length = (kinds: DiffPart['kind'][]) =>
    parts.reduce((sum, part) => sum + (kinds.includes(part.kind) ? part.text.trim().length : 0), 0);
  const kept =
    length(['same']) /
    Math.max(1, Math.min(length(['same', 'removed']), length(['same', 'added'])));
  const joins = (i: number) =>
    kept < KEPT || (parts[i]!.text.trim() === '' && i > 0 && i < parts.length - 1);
  const out: DiffPart[] = [];
  let removed = '';
  let added = '';
  const flush = () => {
    if (removed) out.push({ kind: 'removed', text: removed });
    if (added) out.push({ kind: 'added', text: added });
    removed = '';
    added = '';
  };
  parts.forEach(({ kind, text }, i) => {
    if (kind === 'same' && !joins(i)) {
      flush();
      out.push({ kind, text });
      return;
    }
    if (kind !== 'added') removed += text;
    if (kind !== 'removed') added += text;
  });
  flush();
  return out;
}

function middle(
  left: string[],
  right: string[],
  push: (kind: DiffPart['kind'], text: string) => void,
): void {
  const width = right.length + 1;
  const lengths = new Uint32Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i -= 1) {
    for (let j = right.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] =
        left[i] === right[j]
          ? lengths[(i + 1) * width + j + 1]! + 1
          : Math.max(lengths[(i + 1) * width + j]!, lengths[i * width + j + 1]!);
    }
  }
  let i = 0;
  let j = 0;
  while (i < left.length || j < right.length) {
    if (i < left.length && j < right.length && left[i] === right[j]) {
      push('same', left[i]!);
      i += 1;
      j += 1;
    } else if (
      j >= right.length ||
      (i < left.length && lengths[(i + 1) * width + j]! >= lengths[i * width + j + 1]!)
    ) {
      push('removed', left[i]!);
      i += 1;
    } else {
      push('added', right[j]!);
      j += 1;
    }
  }
}
