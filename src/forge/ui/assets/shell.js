// What surrounds every view: the bar at the top, the connection, the keys.

const THEME = 'forge-theme';

function rememberTheme(theme) {
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // A browser that keeps nothing follows the system's setting again next time.
  }
}

function recallTheme() {
  try {
    const theme = localStorage.getItem(THEME);
    if (theme === 'dark' || theme === 'light') document.documentElement.dataset.theme = theme;
  } catch {
    // As above.
  }
}

const KEYS = [
  ['/', 'search'], ['← →', 'on a chart: move the cursor; elsewhere: previous and next'], ['+ −', 'on a chart: zoom'], ['Esc', 'whole run, no cursor'],
  ['j k', 'next and previous row of a list'], ['Enter', 'open the row'], ['x', 'tick the row, to compare runs'], ['c', 'compare the ticked runs; on rollouts: the group side by side'], ['g', 'list of runs'], ['t', 'light or dark'], ['?', 'these keys'],
];

class Shell {
  constructor(root) {
    this.trail = make('nav', { class: 'trail', 'aria-label': 'Place' });
    this.link = make('span', { class: 'link', role: 'status', 'data-test': 'link' });
    this.theme = themeButton();
    this.stage = make('main', { id: 'stage', tabindex: -1 });
    this.keys = this.keyList();
    this.view = null;
    root.append(
      make('a', { class: 'skip', href: '#stage', text: 'Skip to the content' }),
      make('header', { class: 'topbar' }, link('/', { class: 'home', 'aria-label': 'All runs' }, brandMark(), make('span', { text: 'TorchForge' })), this.trail, this.link,
        make('button', { type: 'button', class: 'theme', 'aria-label': 'Keys', text: '?', on: { click: () => this.keys.showModal() } }), this.theme),
      this.stage,
      this.keys,
    );
    document.addEventListener('keydown', (event) => this.key(event));
  }

  keyList() {
    const rows = KEYS.flatMap(([key, what]) => [make('dt', {}, make('kbd', { text: key })), make('dd', { text: what })]);
    return make('dialog', { class: 'keys', 'aria-label': 'Keys' }, make('h2', { text: 'Keys' }), make('dl', {}, ...rows), make('form', { method: 'dialog' }, make('button', { text: 'Close' })));
  }

  show(view, trail) {
    this.view?.close();
    this.view = view;
    this.trail.replaceChildren(...trail);
    this.stage.replaceChildren(view.node);
    window.scrollTo(0, 0);
  }

  // Says whether the server answers.
  connected(isConnected) {
    this.link.className = `link ${isConnected ? 'up' : 'down'}`;
    this.link.textContent = isConnected ? '' : 'The server does not answer. Start it again with forge ui.';
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || this.keys.open) return;
    const actions = { '?': () => this.keys.showModal(), t: () => this.theme.click(), g: () => go('/') };
    const action = actions[event.key] || this.view?.keys?.[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}
