import { describe, expect, it } from 'vitest';
import { downsample, smooth, type Point } from '../../src/lib/charts/downsample';

const wave = (n: number): Point[] => Array.from({ length: n }, (_, i) => [i, Math.sin(i / 50)]);

describe('downsample', () => {
  it('leaves short series alone', () => {
    const points = wave(10);
    expect(downsample(points, 100)).toEqual(points);
  });

  it('keeps a single spike in either direction, wherever it is', () => {
    for (const at of [1, 777, 4_999, 9_998]) {
      const points = wave(10_000);
      points[at] = [at, 40];
      points[at === 1 ? 3 : at - 1] = [at === 1 ? 3 : at - 1, -40];
      const out = downsample(points, 200);
      expect(out.length).toBeLessThanOrEqual(200);
      expect(Math.max(...out.map(([, y]) => y))).toBe(40);
      expect(Math.min(...out.map(([, y]) => y))).toBe(-40);
    }
  });

  it('keeps both ends and the order of x', () => {
    const out = downsample(wave(5_000), 101);
    expect(out[0]).toEqual([0, 0]);
    expect(out.at(-1)?.[0]).toBe(4_999);
    expect(out.every(([x], i) => i === 0 || x > out[i - 1]![0])).toBe(true);
  });

  it('drops values that are no numbers instead of drawing them', () => {
    expect(
      downsample(
        [
          [0, 1],
          [1, Number.NaN],
          [2, Number.POSITIVE_INFINITY],
          [3, 2],
        ],
        10,
      ),
    ).toEqual([
      [0, 1],
      [3, 2],
    ]);
  });
});

describe('smooth', () => {
  it('is the identity at weight 0', () => {
    expect(smooth([3, 1, 4], 0)).toEqual([3, 1, 4]);
  });

  it('starts at the first value and keeps a constant constant', () => {
    expect(smooth([5, 5, 5, 5], 0.9).map((v) => Number(v.toFixed(9)))).toEqual([5, 5, 5, 5]);
    expect(smooth([8, 0, 0], 0.5)[0]).toBeCloseTo(8);
  });

  it('matches the closed form with the bias removed', () => {
    const [, second] = smooth([1, 3], 0.5);
    expect(second).toBeCloseTo((1 * 0.25 + 3 * 0.5) / 0.75);
  });
});
