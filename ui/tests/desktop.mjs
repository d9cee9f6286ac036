// Drives the real window through WebKitWebDriver, without a middleman:
//   xvfb-run -a dbus-run-session -- node tests/desktop.mjs PATH_TO_spotter-desktop [--shots DIR]
// Start, the daemon's page, a vote in Review, close to the tray, quit; nothing may be left running.
// Uses a scratch home. SPOTTER_MODEL and SPOTTER_PORT name what the daemon serves, and where.
import { execFileSync, spawn } from 'node:child_process';
import {
  mkdirSync,
  mkdtempSync,
  readFileSync,
  readdirSync,
  readlinkSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

const binary = resolve(process.argv[2]);
const at = process.argv.indexOf('--shots');
const shots = at < 0 ? null : process.argv[at + 1];
const port = 4400 + Math.floor(Math.random() * 400);
const home = mkdtempSync(join(tmpdir(), 'spotter-desktop-'));
const token = 'window-test';
const daemon = process.env.SPOTTER_URL ?? 'http://127.0.0.1:8100';
const headers = { authorization: `Bearer ${token}`, 'content-type': 'application/json' };
// The first close explains the tray in a native dialog, which no driver can answer.
mkdirSync(join(home, 'config/dev.spotter.desktop'), { recursive: true });
writeFileSync(join(home, 'config/dev.spotter.desktop/tray-explained'), '');

/** Every process of this test, by the scratch home in its environment. */
const processes = () =>
  readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name) && Number(name) !== process.pid)
    .flatMap((pid) => {
      try {
        const own = readFileSync(`/proc/${pid}/environ`, 'utf8').includes(
          `SPOTTER_DATA_DIR=${home}`,
        );
        return own ? [{ pid: Number(pid), program: readlinkSync(`/proc/${pid}/exe`) }] : [];
      } catch {
        return [];
      }
    });
const healthy = async () => (await fetch(`${daemon}/healthz`).catch(() => ({ ok: false }))).ok;
const visible = () => {
  try {
    return execFileSync('xdotool', ['search', '--onlyvisible', '--name', '^Spotter$'], {
      encoding: 'utf8',
    })
      .trim()
      .split('\n');
  } catch {
    return [];
  }
};
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

const driver = spawn('WebKitWebDriver', [`--port=${port}`], {
  stdio: 'inherit',
  env: {
    ...process.env,
    HOME: home,
    SPOTTER_DATA_DIR: join(home, 'spotter'),
    SPOTTER_TOKEN: token,
    XDG_DATA_HOME: join(home, 'data'),
    XDG_CONFIG_HOME: join(home, 'config'),
    TAURI_AUTOMATION: 'true',
    TAURI_WEBVIEW_AUTOMATION: 'true',
  },
});
const call = async (method, path, body) => {
  const response = await fetch(`http://127.0.0.1:${port}${path}`, {
    method,
    headers: { 'content-type': 'application/json' },
    body: body && JSON.stringify(body),
  });
  const { value } = await response.json();
  if (!response.ok) throw new Error(JSON.stringify(value));
  return value;
};
const until = async (what, work, ms = 30_000) => {
  const end = Date.now() + ms;
  for (;;) {
    const got = await work().catch(() => null);
    if (got) return got;
    if (Date.now() > end) throw new Error(`waited ${ms} ms for ${what}`);
    await pause(150);
  }
};

let failed = false;
try {
  await until('the driver', () => call('GET', '/status'));
  const started = Date.now();
  const { sessionId } = await call('POST', '/session', {
    capabilities: { alwaysMatch: { 'webkitgtk:browserOptions': { binary, args: [] } } },
  });
  const session = `/session/${sessionId}`;
  const script = (body, ...args) => call('POST', `${session}/execute/sync`, { script: body, args });
  const shot = async (name) => {
    if (!shots) return;
    mkdirSync(shots, { recursive: true });
    writeFileSync(
      join(shots, `${name}.png`),
      Buffer.from(await call('GET', `${session}/screenshot`), 'base64'),
    );
  };
  await until('the app', () =>
    script("return document.querySelector('nav h1, main h1')?.textContent"),
  );
  console.log(`first page after ${Date.now() - started} ms`);
  await shot('start');
  const title = await until(
    'the home page',
    () =>
      script(
        "return document.querySelector('nav') && document.querySelector('main h1')?.textContent",
      ),
    90_000,
  );
  console.log(`daemon's page after ${Date.now() - started} ms: ${title}`);
  console.log(
    `token in the address: ${(await script('return location.search')).includes('token')}`,
  );
  console.log(`file dialogs offered: ${await script('return typeof window.__TAURI__')}`);
  // What the daemon's pages may ask of the shell: a file dialog, which stays open, and nothing else.
  const ask = (command) =>
    call('POST', `${session}/execute/async`, {
      script: `const done = arguments[arguments.length - 1];
        window.__TAURI__.core.invoke(${JSON.stringify(command)}, { options: {} }).then(() => done('allowed'), () => done('denied'));
        setTimeout(() => done('waits'), 1500);`,
      args: [],
    });
  for (const [command, expected] of [
    ['plugin:autostart|enable', 'denied'],
    ['quit', 'denied'],
    ['plugin:dialog|open', 'waits'],
  ]) {
    const got = await ask(command);
    console.log(`${command}: ${got}`);
    if (got !== expected) throw new Error(`${command} is ${got}, not ${expected}`);
  }
  await shot('home');
  await script("location.hash = '#/review'");
  const answered = await fetch(`${daemon}/v1/chat/completions`, {
    method: 'POST',
    headers,
    body: JSON.stringify({
      model: 'spotter',
      max_tokens: 60,
      messages: [{ role: 'user', content: 'What is a good reason to take a walk?' }],
    }),
  });
  if (!answered.ok) throw new Error(`the daemon answered ${answered.status}`);
  await script("location.hash = '#/home'");
  await pause(500);
  await script("location.hash = '#/review'");
  await until('an answer to rate', () =>
    script("return document.querySelectorAll('section ul li').length > 0"),
  );
  await until('its page', () =>
    script(
      "return [...document.querySelectorAll('button')].some((b) => b.textContent.includes('Good'))",
    ),
  );
  await script("window.dispatchEvent(new KeyboardEvent('keydown', {key: '1', bubbles: true}))");
  await until('the vote in the list', () =>
    script("return document.querySelector('section ul .text-liked') !== null"),
  );
  const { counts } = await (await fetch(`${daemon}/api/v1/status`, { headers })).json();
  if (counts.up !== 1) throw new Error(`the daemon counts ${counts.up} votes`);
  console.log('a vote by the key 1 is shown in the list and kept by the daemon');
  await shot('window-review-light-en');

  const [window] = visible();
  if (!window) throw new Error('no visible window before closing it');
  const close = new URL('../../scripts/close-window.py', import.meta.url).pathname;
  execFileSync('python3', [close, window]);
  await until('the window to hide', async () => visible().length === 0);
  if (!(await healthy())) throw new Error('closing the window ended the daemon');
  console.log('closing the window hides it; the daemon goes on');

  const shell = processes().find(({ program }) => program === binary);
  if (!shell) throw new Error('the shell has ended with its window');
  process.kill(shell.pid, 'SIGTERM');
  await until('everything to end', async () =>
    processes().every(({ program }) => !program.includes('spotter')),
  );
  if (await healthy()) throw new Error('the daemon answers after the end');
  console.log('quitting ends the daemon and its workers');
  await call('DELETE', session).catch(() => {});
} catch (error) {
  console.error(error);
  failed = true;
} finally {
  driver.kill();
  await pause(1000);
  const left = processes();
  for (const { pid, program } of left) {
    if (program.includes('spotter')) {
      console.error(`left running: ${program}`);
      failed = true;
    }
    try {
      process.kill(pid, 'SIGKILL');
    } catch {
      // It has ended meanwhile.
    }
  }
  rmSync(home, { recursive: true, force: true });
}
process.exit(failed ? 1 : 0);
