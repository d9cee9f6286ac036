import { getLocale, setLocale } from '$paraglide/runtime.js';

export type Theme = 'system' | 'light' | 'dark';
export type Locale = ReturnType<typeof getLocale>;

const dark = window.matchMedia('(prefers-color-scheme: dark)');

function read<T extends string>(key: string, allowed: readonly T[], fallback: T): T {
  const stored = localStorage.getItem(key);
  return allowed.find((value) => value === stored) ?? fallback;
}

/** What this browser remembers about how the app looks and behaves. */
class Preferences {
  theme = $state<Theme>(read('spotter.theme', ['system', 'light', 'dark'], 'system'));
  locale = $state<Locale>(getLocale());
  systemDark = $state(dark.matches);
  autoAdvance = $state(read('spotter.advance', ['on', 'off'], 'on') === 'on');
  smoothing = $state(Number(localStorage.getItem('spotter.smoothing') ?? 0.6));
  welcomed = $state(read('spotter.welcomed', ['yes', 'no'], 'no') === 'yes');
  readonly isDark = $derived(this.theme === 'dark' || (this.theme === 'system' && this.systemDark));

  constructor() {
    dark.addEventListener('change', () => {
      this.systemDark = dark.matches;
      this.apply();
    });
    this.apply();
  }

  apply(): void {
    document.documentElement.dataset.theme = this.isDark ? 'dark' : 'light';
    document.documentElement.lang = this.locale;
  }

  setTheme(theme: Theme): void {
    this.theme = theme;
    localStorage.setItem('spotter.theme', theme);
    this.apply();
  }

  setLocale(locale: Locale): void {
    void setLocale(locale, { reload: false });
    this.locale = locale;
    this.apply();
  }

  setAutoAdvance(on: boolean): void {
    this.autoAdvance = on;
    localStorage.setItem('spotter.advance', on ? 'on' : 'off');
  }

  setSmoothing(weight: number): void {
    this.smoothing = weight;
    localStorage.setItem('spotter.smoothing', String(weight));
  }

  setWelcomed(): void {
    this.welcomed = true;
    localStorage.setItem('spotter.welcomed', 'yes');
  }
}

export const preferences = new Preferences();
