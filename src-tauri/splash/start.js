// The page before the daemon's own: it waits, or says why there is nothing to show.
const chinese = navigator.language.toLowerCase().startsWith('zh');
const words = chinese
  ? { starting: '正在启动 Spotter', failed: 'Spotter 未能启动', retry: '重试', quit: '退出' }
  : { starting: 'Spotter is starting', failed: 'Spotter could not be started', retry: 'Try again', quit: 'Quit' };
const element = (id) => document.getElementById(id);

function show() {
  const reason = new URLSearchParams(window.location.hash.slice(1)).get('failed');
  element('title').textContent = reason ? words.failed : words.starting;
  element('detail').textContent = reason ?? '';
  element('actions').hidden = !reason;
}

document.documentElement.lang = chinese ? 'zh-CN' : 'en';
element('retry').textContent = words.retry;
element('quit').textContent = words.quit;
element('retry').addEventListener('click', () => window.__TAURI__.core.invoke('retry'));
element('quit').addEventListener('click', () => window.__TAURI__.core.invoke('quit'));
window.addEventListener('hashchange', show);
show();
