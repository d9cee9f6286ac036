export const SCREENS = [
  'home',
  'review',
  'conversations',
  'training',
  'adapters',
  'models',
  'chat',
  'settings',
] as const;

export type Screen = (typeof SCREENS)[number];

/** The address after `#`: `/review/UID` is the screen `review` with the argument `UID`. */
function parse(hash: string): { screen: Screen; argument: string | null } {
  const [screen, argument] = hash.replace(/^#?\/?/, '').split('/');
  return {
    screen: SCREENS.find((name) => name === screen) ?? 'home',
    argument: argument ? decodeURIComponent(argument) : null,
  };
}

export const route = $state(parse(window.location.hash));

window.addEventListener('hashchange', () => Object.assign(route, parse(window.location.hash)));

export function href(screen: Screen, argument?: string | number | null): string {
  return argument ? `#/${screen}/${encodeURIComponent(argument)}` : `#/${screen}`;
}

/** Goes to a screen; `replace` leaves no entry behind, for moving through a list. */
export function go(screen: Screen, argument?: string | number | null, replace = false): void {
  const hash = href(screen, argument);
  if (replace) {
    window.history.replaceState(null, '', hash);
    Object.assign(route, parse(hash));
  } else {
    window.location.hash = hash;
  }
}
