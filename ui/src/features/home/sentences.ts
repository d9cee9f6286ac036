import type { Status } from '$lib/api/types';
import { count } from '$lib/text/format';
import { m } from '$paraglide/messages.js';
import { adapterInline } from '../adapters/words';

/** Is it working? One sentence, and the reason when it is not. */
export function headline(status: Status): { title: string; lede?: string } {
  if (status.disk.recording_stopped)
    return { title: m.home_disk_full(), lede: m.home_disk_full_lede() };
  switch (status.model.state) {
    case 'failed':
      return { title: m.home_model_failed(), lede: status.model.error ?? undefined };
    case 'loading':
      return {
        title: m.home_model_loading(),
        lede: m.home_model_loading_lede({ name: status.model.name }),
      };
    case 'none':
      return { title: m.home_no_model(), lede: m.home_no_model_lede() };
  }
  if (!status.connect.first_request_at) return { title: m.home_ready(), lede: m.home_ready_lede() };
  if (!status.recording) return { title: m.home_paused(), lede: m.home_paused_lede() };
  return {
    title: m.home_working(),
    lede: m.home_working_lede({
      adapter: adapterInline(status.adapter.live),
    }),
  };
}

/** What happens next? The daemon's reason in words of the reader's language where the state says it all. */
export function nextLesson(status: Status): string {
  const { training } = status;
  switch (training.state) {
    case 'training':
      return m.lesson_training();
    case 'checking':
      return m.lesson_checking();
    case 'collecting': {
      const missing = training.needed_labels - training.fresh_labels;
      return missing > 0
        ? m.lesson_collecting({ count: missing, shown: count(missing) })
        : training.reason;
    }
    case 'paused':
      return m.lesson_paused();
    default:
      return training.reason;
  }
}
