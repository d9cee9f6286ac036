import { getLocale } from '$paraglide/runtime.js';

const number = (value: number, options: Intl.NumberFormatOptions) =>
  new Intl.NumberFormat(getLocale(), options).format(value);

export const count = (value: number) => number(value, { maximumFractionDigits: 0 });

/** At most three significant digits, so that neighbouring readings can be compared. */
export function figure(value: number): string {
  if (!Number.isFinite(value)) return '–';
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) {
    return value.toExponential(1).replace('e-', 'e−').replace(/^-/, '−');
  }
  const digits =
    Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 1 ? 2 : 3;
  return number(value, { maximumFractionDigits: digits }).replace(/^-/, '−');
}

export const percent = (ratio: number) =>
  number(ratio, { style: 'percent', maximumFractionDigits: 0 });

export function bytes(value: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${number(value, { maximumFractionDigits: value < 10 && unit > 1 ? 1 : 0 })} ${units[unit]}`;
}

/** Parameters of a model: 135 M, 1.7 B. */
export function parameters(value: number): string {
  return value >= 1e9
    ? `${number(value / 1e9, { maximumFractionDigits: 1 })} B`
    : value >= 1e6
      ? `${number(value / 1e6, { maximumFractionDigits: 0 })} M`
      : `${number(value / 1e3, { maximumFractionDigits: 0 })} K`;
}

/** A span such as `2 min 5 s`; never more than two units. */
export function duration(seconds: number): string {
  const unit = (value: number, name: string) =>
    number(value, { style: 'unit', unit: name, unitDisplay: 'short' });
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return unit(s, 'second');
  const minutes = Math.floor(s / 60);
  if (minutes < 60) {
    return s % 60
      ? `${unit(minutes, 'minute')} ${unit(s % 60, 'second')}`
      : unit(minutes, 'minute');
  }
  const hours = Math.floor(minutes / 60);
  if (hours < 48) {
    return minutes % 60
      ? `${unit(hours, 'hour')} ${unit(minutes % 60, 'minute')}`
      : unit(hours, 'hour');
  }
  return unit(Math.round(hours / 24), 'day');
}

/** `3 minutes ago` for today, a date for older moments. */
export function moment(at: number, now = Date.now()): string {
  const seconds = Math.round((at - now) / 1000);
  const relative = new Intl.RelativeTimeFormat(getLocale(), { numeric: 'auto' });
  if (Math.abs(seconds) < 45) return relative.format(0, 'second');
  if (Math.abs(seconds) < 3600) return relative.format(Math.round(seconds / 60), 'minute');
  if (Math.abs(seconds) < 86_400) return relative.format(Math.round(seconds / 3600), 'hour');
  return new Intl.DateTimeFormat(getLocale(), { dateStyle: 'medium' }).format(at);
}

export const timestamp = (at: number) =>
  new Intl.DateTimeFormat(getLocale(), { dateStyle: 'medium', timeStyle: 'short' }).format(at);

export const clock = (at: number) =>
  new Intl.DateTimeFormat(getLocale(), { timeStyle: 'short' }).format(at);
