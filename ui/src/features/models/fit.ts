import type { Fit, Hardware, Model } from '$lib/api/types';
import { bytes } from '$lib/text/format';
import { m } from '$paraglide/messages.js';

/** The largest model of the catalogue that fits for serving and for training; else for serving. */
export function recommended(models: Model[]): Model | undefined {
  const score = (model: Model) => {
    if (model.fits.serve === 'no') return -1;
    return (
      (model.fits.train === 'fits' ? 2 : model.fits.train === 'tight' ? 1 : 0) +
      (model.fits.serve === 'fits' ? 2 : 0)
    );
  };
  return models
    .filter((model) => score(model) >= 0)
    .sort((a, b) => score(b) - score(a) || b.parameters - a.parameters)[0];
}

/** The plain verdict on this machine. */
export function hardwareSentence(found: Hardware | null): string {
  const hardware = found ?? {};
  const ram = hardware.memory_bytes ? bytes(hardware.memory_bytes) : '–';
  const gpu = hardware.gpus?.[0];
  return gpu
    ? m.hardware_gpu({
        name: gpu.name,
        free: bytes(gpu.memory_free_bytes),
        total: bytes(gpu.memory_bytes),
      })
    : m.hardware_cpu({ cores: String(hardware.cores ?? '–'), ram });
}

export const fitWord: Record<Fit, () => string> = {
  fits: m.fit_fits,
  tight: m.fit_tight,
  no: m.fit_no,
};
