export type Point = [number, number];

/**
 * Reduces a series to at most `limit` points and keeps every spike: each bucket gives its lowest and
 * its highest point, in their order. The first and the last point always stay. Points whose value
 * is not finite are left out.
 */
export function downsample(points: readonly Point[], limit: number): Point[] {
  const finite = points.filter(([, y]) => Number.isFinite(y));
  if (finite.length <= limit || limit < 4) return finite.slice();
  const first = finite[0]!;
  const last = finite[finite.length - 1]!;
  const inner = finite.slice(1, -1);
  const buckets = Math.floor((limit - 2) / 2);
  const out: Point[] = [first];
  for (let bucket = 0; bucket < buckets; bucket += 1) {
    const from = Math.floor((bucket * inner.length) / buckets);
    const to = Math.floor(((bucket + 1) * inner.length) / buckets);
    let low = from;
    let high = from;
    for (let i = from + 1; i < to; i += 1) {
      if (inner[i]![1] < inner[low]![1]) low = i;
      if (inner[i]![1] > inner[high]![1]) high = i;
    }
    if (from >= to) continue;
    out.push(inner[Math.min(low, high)]!);
    if (low !== high) out.push(inner[Math.max(low, high)]!);
  }
  out.push(last);
  return out;
}

/**
 * Exponential moving average with the start-up bias removed, so the first points are not drawn
 * towards zero. `weight` 0 returns the values unchanged.
 */
export function smooth(values: readonly number[], weight: number): number[] {
  if (weight <= 0) return values.slice();
  let average = 0;
  let seen = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    average = average * weight + (1 - weight) * value;
    seen += 1;
    return average / (1 - weight ** seen);
  });
}
