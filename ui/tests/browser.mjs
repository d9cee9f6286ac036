// What the browser tests share: the system Chromium, one page per theme and language, and axe.
import { createRequire } from 'node:module';
import { readFileSync } from 'node:fs';
import { chromium } from 'playwright-core';

const axeSource = readFileSync(
  createRequire(import.meta.url).resolve('axe-core/axe.min.js'),
  'utf8',
);

export const SCREENS = [
  'home',
  'review',
  'conversations',
  'training',
  'adapters',
  'models',
  'chat',
  'settings',
];

export const launch = () =>
  chromium.launch({
    executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
    args: [
      '--no-sandbox',
      '--disable-gpu',
      '--no-first-run',
      '--disable-background-networking',
      '--disable-component-update',
      '--disable-sync',
    ],
  });

/** A page that is signed in. Script errors and requests to other hosts are collected in `problems`. */
export async function open(
  browser,
  url,
  { theme = 'light', locale = 'en', width = 1280, height = 800 } = {},
) {
  const context = await browser.newContext({
    viewport: { width, height },
    colorScheme: theme,
    locale,
    reducedMotion: 'reduce',
    deviceScaleFactor: 1,
  });
  await context.addInitScript(
    ([t, l]) => {
      localStorage.setItem('spotter.theme', t);
      localStorage.setItem('PARAGLIDE_LOCALE', l);
    },
    [theme, locale],
  );
  await context.addInitScript(() => {
    document.addEventListener('securitypolicyviolation', (event) => {
      console.error(
        `refused by the policy: ${event.violatedDirective} at ${event.sourceFile}:${event.lineNumber}:${event.columnNumber}, ${document.activeElement?.tagName} ${location.hash}`,
      );
    });
  });
  const page = await context.newPage();
  const problems = [];
  const own = new URL(url).host;
  page.on('pageerror', (error) => problems.push(`page error: ${error.message}`));
  page.on('console', (message) => {
    if (message.type() === 'error' && !/status of (4|5)\d\d/.test(message.text()))
      problems.push(`console: ${message.text()}`);
  });
  page.on('response', (response) => {
    if (response.status() >= 400)
      problems.push(`${response.status()} ${response.request().method()} ${response.url()}`);
  });
  page.on('request', (request) => {
    const { host, protocol } = new URL(request.url());
    if (protocol.startsWith('http') && host !== own)
      problems.push(`foreign request: ${request.url()}`);
  });
  await page.goto(url);
  await page.locator('nav').waitFor();
  return { page, context, problems };
}

export async function show(page, screen) {
  await page.evaluate((name) => (window.location.hash = `#/${name}`), screen);
  await page.waitForTimeout(700);
}

/** Serious and critical findings of axe, one line each. */
export async function audit(page) {
  await page.evaluate(axeSource);
  const { violations } = await page.evaluate(() =>
    window.axe.run(document, { resultTypes: ['violations'] }),
  );
  return violations
    .filter(({ impact }) => impact === 'serious' || impact === 'critical')
    .map(
      ({ id, nodes }) =>
        `${id}: ${nodes
          .slice(0, 3)
          .map((node) => node.target.join(' '))
          .join(' | ')}`,
    );
}
