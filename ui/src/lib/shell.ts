/**
 * What the desktop window adds: native file dialogs. In a browser, paths are typed. This file is the
 * only one that knows the shell; it speaks to it through the global the shell injects.
 */
interface Shell {
  core: { invoke<T>(command: string, argument?: unknown): Promise<T> };
}

const shell = (window as unknown as { __TAURI__?: Shell }).__TAURI__;

export const hasDialogs = shell !== undefined;

export function chooseFolder(title: string): Promise<string | null> {
  return open({ title, directory: true });
}

export function chooseFile(title: string, extensions: string[]): Promise<string | null> {
  return open({ title, directory: false, filters: [{ name: title, extensions }] });
}

async function open(options: object): Promise<string | null> {
  if (!shell) return null;
  return shell.core.invoke<string | null>('plugin:dialog|open', { options });
}
