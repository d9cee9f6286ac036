import { fileURLToPath } from 'node:url';
import { paraglideVitePlugin } from '@inlang/paraglide-js';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import tailwindcss from '@tailwindcss/vite';
import { defineConfig, type Plugin } from 'vite';

const path = (relative: string) => fileURLToPath(new URL(relative, import.meta.url));

/**
 * Everything a page of ours may load comes from the daemon itself. The development server injects
 * inline styles, so the policy is written into the built page only.
 */
const policy = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  "font-src 'self'",
  "img-src 'self' data:",
  "connect-src 'self' ipc: http://ipc.localhost",
  "base-uri 'none'",
  "form-action 'none'",
].join('; ');

const contentSecurityPolicy: Plugin = {
  name: 'content-security-policy',
  apply: 'build',
  transformIndexHtml: () => [
    {
      tag: 'meta',
      attrs: { 'http-equiv': 'Content-Security-Policy', content: policy },
      injectTo: 'head-prepend',
    },
  ],
};

const daemon = process.env.SPOTTER_URL ?? 'http://127.0.0.1:8100';

export default defineConfig({
  plugins: [
    paraglideVitePlugin({
      project: './project.inlang',
      outdir: './src/paraglide',
      strategy: ['localStorage', 'preferredLanguage', 'baseLocale'],
      isServer: 'false',
    }),
    tailwindcss(),
    svelte(),
    contentSecurityPolicy,
  ],
  resolve: {
    alias: {
      $lib: path('./src/lib'),
      $components: path('./src/components'),
      $paraglide: path('./src/paraglide'),
    },
  },
  build: { target: 'es2022', assetsInlineLimit: 0, chunkSizeWarningLimit: 700 },
  server: {
    host: '127.0.0.1',
    proxy: { '/api': daemon, '/v1': daemon, '/healthz': daemon },
  },
});
