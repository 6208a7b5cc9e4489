// Where the reader is. The address has it, so that it can be kept and sent: the run, the view, the range, the step.

// The run in the folder of runs itself. Browsers leave a dot out of an address.
const HERE = '.';

function readPlace() {
  const path = decodeURIComponent(location.pathname);
  const query = new URLSearchParams(location.search);
  const run = path.startsWith('/run/') ? path.slice('/run/'.length) || HERE : null;
  return { run, page: path === '/compare' ? 'compare' : run === null ? 'runs' : 'run', view: query.get('view') || 'charts', query };
}

function placeOf(run, query = {}) {
  const known = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ''));
  const path = run === null ? '/' : `/run/${(run === HERE ? '' : run).split('/').map(encodeURIComponent).join('/')}`;
  return known.size ? `${path}?${known}` : path;
}

const KEEP_MS = 250;
let keeping = null;

// Changes parts of the address, without a step in the history. Browsers refuse too many changes in a short time.
function keep(change) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries({ ...keeping?.change, ...change })) {
    if (value === null || value === undefined || value === '') query.delete(name);
    else query.set(name, value);
  }
  const address = query.size ? `${location.pathname}?${query}` : location.pathname;
  clearTimeout(keeping?.timer);
  keeping = {
    change: { ...keeping?.change, ...change },
    timer: setTimeout(() => {
      keeping = null;
      history.replaceState(null, '', address);
    }, KEEP_MS),
  };
}

// Goes to another page of this program.
function go(address) {
  clearTimeout(keeping?.timer);
  keeping = null;
  history.pushState(null, '', address);
  dispatchEvent(new PopStateEvent('popstate'));
}

// A link that does not load the page again, except in a tab of its own.
function link(address, properties, ...children) {
  const node = make('a', { href: address, ...properties }, ...children);
  node.addEventListener('click', (event) => {
    if (event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    go(address);
  });
  return node;
}
