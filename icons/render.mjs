// Renders the PNG set from the SVG sources with the system Chromium: node icons/render.mjs
// Small sizes come from tray.svg, whose strokes are heavier so that the mark reads at 16 px.
import { readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
const require = createRequire(new URL('../ui/package.json', import.meta.url));
const { chromium } = require('playwright-core');
const here = (name) => new URL(name, import.meta.url);
const out = [
  ['tray.svg', 16, '16x16.png'], ['tray.svg', 32, '32x32.png'], ['tray.svg', 32, 'tray.png'],
  ['spotter.svg', 64, '64x64.png'], ['spotter.svg', 128, '128x128.png'],
  ['spotter.svg', 256, '128x128@2x.png'], ['spotter.svg', 512, 'icon.png'],
];
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'],
});
for (const [source, size, name] of out) {
  const page = await browser.newPage({ viewport: { width: size, height: size } });
  const svg = readFileSync(here(source), 'utf8').replace('<svg ', `<svg width="${size}" height="${size}" `);
  await page.setContent(`<body style="margin:0;background:transparent">${svg}</body>`);
  writeFileSync(here(name), await page.screenshot({ omitBackground: true }));
  await page.close();
}
await browser.close();
