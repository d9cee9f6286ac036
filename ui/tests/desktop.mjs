// Drives the real window through WebKitWebDriver, without a middleman:
//   xvfb-run -a dbus-run-session -- node tests/desktop.mjs PATH_TO_spotter-desktop [--shots DIR]
// Start, the daemon's page, a vote in Review, close to the tray, quit. Uses a scratch home.
import { spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';

const binary = resolve(process.argv[2]);
const at = process.argv.indexOf('--shots');
const shots = at < 0 ? null : process.argv[at + 1];
const port = 4400 + Math.floor(Math.random() * 400);
const home = mkdtempSync(join(tmpdir(), 'spotter-desktop-'));
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

const driver = spawn('WebKitWebDriver', [`--port=${port}`], {
  stdio: 'inherit',
  env: {
    ...process.env,
    HOME: home,
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
  const answers = await until(
    'the queue',
    () => script("return document.querySelectorAll('section ul li').length || null"),
    5000,
  ).catch(() => 0);
  if (answers > 0) {
    await until('an answer', () =>
      script(
        "return [...document.querySelectorAll('button')].find((b) => b.textContent.includes('Good')) !== undefined",
      ),
    );
    await script("window.dispatchEvent(new KeyboardEvent('keydown', {key: '1', bubbles: true}))");
    await until('the vote', () =>
      script("return document.querySelector('section ul .text-liked') !== null"),
    );
    console.log('a vote by the key 1 is shown in the list');
  }
  await shot('review');
  await call('DELETE', session);
} catch (error) {
  console.error(error);
  failed = true;
} finally {
  driver.kill();
}
process.exit(failed ? 1 : 0);
