// What the server is asked, and what it tells without being asked.

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Of a parameter that is a list every value is sent.
function queryOf(parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  return new URLSearchParams(given.flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((each) => [name, each ?? ''])));
}

async function ask(path, parameters = {}) {
  const answer = await fetch(`/api/${path}?${queryOf(parameters)}`, { cache: 'no-store' });
  return readAnswer(answer);
}

async function readAnswer(answer) {
  if (answer.ok) return answer.json();
  const told = await answer.json().catch(() => null);
  throw new Refusal(answer.status, told?.error?.message || `the server answered with status ${answer.status}`);
}

const RETRY_MS = 1500;

// News of the list, and of runs. The connection is closed while the page is hidden: a browser has six for a server.
class News {
  // `parameters()` says what the page has already; `heard(name, data)` is called with each event.
  constructor(parameters, heard, changed) {
    Object.assign(this, { parameters, heard, changed, source: null, retry: null, failures: 0 });
    this.onVisibility = () => (document.hidden ? this.pause() : this.open());
    document.addEventListener('visibilitychange', this.onVisibility);
    this.open();
  }

  open() {
    clearTimeout(this.retry);
    if (this.source || document.hidden) return;
    const source = new EventSource(`/api/events?${queryOf(this.parameters())}`);
    this.source = source;
    source.addEventListener('open', () => this.tell(0));
    source.addEventListener('error', () => {
      if (source !== this.source) return;
      this.pause();
      this.tell(this.failures + 1);
      this.retry = setTimeout(() => this.open(), RETRY_MS);
    });
    for (const name of ['list', 'run', 'rows']) source.addEventListener(name, (event) => this.heard(name, JSON.parse(event.data)));
  }

  tell(failures) {
    this.failures = failures;
    this.changed(failures === 0);
  }

  pause() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  // Asks for news from what the page has now.
  again() {
    this.pause();
    this.open();
  }

  close() {
    document.removeEventListener('visibilitychange', this.onVisibility);
    this.pause();
  }
}
