declare global {
  interface Window {
    /** Set by the desktop shell before the page loads. */
    __SPOTTER__?: { url?: string; token?: string };
  }
}

const KEY = 'spotter.token';

/**
 * Where the daemon is and the token to speak to it with. A token in the address is kept for this
 * tab only and removed from the address at once, so it reaches neither history nor a screenshot.
 */
export function findConnection(): { url: string; token: string | null } {
  const handed = window.__SPOTTER__;
  const address = new URL(window.location.href);
  const given = address.searchParams.get('token');
  if (given) {
    sessionStorage.setItem(KEY, given);
    address.searchParams.delete('token');
    window.history.replaceState(null, '', address);
  }
  return {
    url: handed?.url ?? '',
    token: handed?.token ?? given ?? sessionStorage.getItem(KEY),
  };
}

/** Remembers a token typed by hand and starts afresh with it. */
export function signIn(token: string): void {
  sessionStorage.setItem(KEY, token.trim());
  window.location.reload();
}
