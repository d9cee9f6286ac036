/**
 * A desktop without a locale (`LANG=C`) makes WebKit report the language "c", which is no language
 * tag; every `Intl` constructor that is given it throws, also inside libraries. Imported first.
 */
function isTag(tag: string): boolean {
  try {
    return Intl.getCanonicalLocales(tag).length > 0;
  } catch {
    return false;
  }
}

if (!isTag(navigator.language)) {
  Object.defineProperty(navigator, 'language', { value: 'en', configurable: true });
  Object.defineProperty(navigator, 'languages', { value: ['en'], configurable: true });
}

export {};
