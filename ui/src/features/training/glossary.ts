import type { GlossaryEntry } from '$lib/api/types';
import { getLocale } from '$paraglide/runtime.js';
import { CHINESE } from './glossary.zh';

/** What one metric means, in the reader's language; the daemon's own glossary is English. */
export function explain(name: string, glossary: GlossaryEntry[]): GlossaryEntry {
  const given = glossary.find((entry) => entry.name === name) ?? {
    name,
    title: name.replaceAll('_', ' '),
    unit: '',
    explanation: '',
    normal: '',
  };
  const chinese = getLocale() === 'zh-CN' ? CHINESE[name] : undefined;
  return chinese ? { ...given, ...chinese } : given;
}
