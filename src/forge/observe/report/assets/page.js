// The page: head, bar, charts by section, samples, and what else is known.

function pageHead() {
  const { run, facts, tiles } = data;
  const isWhole = run.totalSteps !== null && run.lastStep >= run.totalSteps;
  const steps = run.totalSteps ? `step ${run.lastStep} of ${run.totalSteps}` : `step ${run.lastStep}`;
  const progress = make('div', { class: 'progress' }, make('i', {}));
  progress.firstChild.style.width = `${run.totalSteps ? Math.min(100, (100 * run.lastStep) / run.totalSteps) : 100}%`;
  return make(
    'header', { class: 'head' },
    make('div', { class: 'brand' }, brandMark(), make('span', { text: 'TorchForge' })),
    make('h1', { text: run.name }),
    make('p', { class: 'state' }, make('b', { class: isWhole ? 'done' : 'going', text: steps }), run.lastTime === null ? ' · no metrics yet' : ` · ${duration(run.lastTime - run.firstTime)} · last metrics ${moment(run.lastTime)}`),
    run.totalSteps && !isWhole ? progress : null,
    make('ul', { class: 'facts' }, ...facts.map(([label, value]) => make('li', {}, make('span', { text: label }), ` ${value}`))),
    make('div', { class: 'tiles' }, ...tiles.map(tile)),
    data.notes.length ? make('ul', { class: 'notes', 'data-test': 'notes' }, ...data.notes.map((note) => make('li', { text: note }))) : null,
  );
}

function brandMark() {
  return draw(
    'svg', { viewBox: '0 0 24 24', class: 'mark', 'aria-hidden': 'true' },
    draw('path', { d: 'M12 1.5c1 4.2 5.6 5.6 5.6 11a5.6 5.6 0 0 1-11.2 0c0-2.3 1-3.7 2.3-5.1.3 1.9 1 2.8 1.9 3.3C10.1 7.400 10.700 4.400 12 1.500z' }),
    draw('path', { d: 'M3.500 20.500h17v2h-17z' }),
  );
}

function tile({ label, value, detail, key }) {
  return make('div', { class: 'tile', title: key }, make('span', { text: label }), make('b', { text: minus(value) }), make('small', { text: minus(detail) }), spark(key));
}

function spark(key) {
  const known = data.columns[key].map((value, row) => [row, value]).filter(([, value]) => value !== null);
  if (known.length < 2) return null;
  const values = known.map(([, value]) => value);
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
  const places = linear(data.steps[known[0][0]], data.steps[known[known.length - 1][0]], 1, 99);
  const points = smooth(known, known.length > 12 ? 0.7 : 0);
  const line = pathOf(points, (row) => places(data.steps[row]), linear(low, high, 26, 3));
  return draw('svg', { class: 'spark', viewBox: '0 0 100 29', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, draw('path', { d: line }));
}

function toolBar(board, samples) {
  const reading = make('span', { class: 'reading', 'data-test': 'reading' });
  const jump = make('button', { type: 'button', text: 'its samples ↓', hidden: true });
  const reset = make('button', { type: 'button', text: 'whole run', hidden: true, on: { click: () => board.show({ range: null }) } });
  const slider = make('input', { type: 'range', min: 0, max: 0.95, step: 0.05, value: 0, 'aria-label': 'Smoothing' });
  slider.addEventListener('input', () => board.show({ smoothing: Number(slider.value) }));
  jump.addEventListener('click', () => {
    samples.goTo(data.steps[board.cursor]);
    document.getElementById('samples').scrollIntoView({ block: 'start' });
  });
  const tell = () => {
    const { cursor, pinned, range } = board;
    reading.textContent = cursor === null ? 'Point at a curve; click to hold the step, drag to zoom' : `Step ${data.steps[cursor]}${pinned ? ' · held' : ''}`;
    jump.hidden = !(pinned && samples);
    reset.hidden = range === null;
  };
  board.listeners.push(tell);
  tell();
  return make('nav', { class: 'bar' }, reading, jump, reset, make('label', {}, make('span', { text: 'Smoothing' }), slider), themeButton());
}

function themeButton() {
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
  const button = make('button', { type: 'button', class: 'theme', 'aria-label': 'Light or dark', text: '◐' });
  button.addEventListener('click', () => { root.dataset.theme = isDark() ? 'light' : 'dark'; });
  return button;
}

function chartSections(board) {
  const sections = new Map();
  data.charts.forEach((plan) => {
    if (!sections.has(plan.section)) sections.set(plan.section, []);
    sections.get(plan.section).push(plan);
  });
  return [...sections].map(([name, plans]) => (name === 'More' ? moreCharts(plans, board) : make(
    'section', { class: 'charts' }, make('h2', { text: name }), make('div', { class: 'grid' }, ...plans.map((plan) => new Chart(plan, board).node)),
  )));
}

// The metrics that no chart above shows are drawn when they are asked for: there can be hundreds.
function moreCharts(plans, board) {
  const grid = make('div', { class: 'grid' });
  const box = make('details', { class: 'more' }, make('summary', { text: `More metrics (${plans.length})` }), grid);
  box.addEventListener('toggle', () => {
    if (box.open && !grid.childElementCount) grid.append(...plans.map((plan) => new Chart(plan, board).node));
  });
  return box;
}

function ledgerTable() {
  const outcomes = Object.entries(data.ledger);
  if (!outcomes.length) return null;
  const all = outcomes.reduce((sum, [, count]) => sum + count, 0);
  return make(
    'section', {}, make('h2', { text: 'What became of the groups' }),
    make('div', { class: 'card ledger' }, make('table', {}, make('tbody', {}, ...outcomes.map(([outcome, count]) => make(
      'tr', {}, make('th', { scope: 'row', text: outcome }), make('td', { text: count.toLocaleString('en-US') }), make('td', { text: `${((100 * count) / all).toFixed(1)}%` }),
    ))))),
  );
}

function leagueTable() {
  const { members, step } = data.league;
  if (!members) return null;
  const cell = (text) => make('td', { text });
  return make(
    'section', { 'data-test': 'league' }, make('h2', { text: 'League' }),
    make('p', { class: 'help', text: `After step ${step}: games of the live policy against each member. A draw counts half; in the win rate recent games count more.` }),
    make('div', { class: 'card ledger' }, make(
      'table', {},
      make('thead', {}, make('tr', {}, ...['opponent', 'Elo', 'games', 'wins', 'draws', 'losses', 'win rate'].map((text) => make('th', { scope: 'col', text })))),
      make('tbody', {}, ...members.map((row) => make(
        'tr', {}, make('th', { scope: 'row', text: row.member }), cell(row.rating.toFixed(0)), ...[row.games, row.wins, row.draws, row.losses].map((count) => cell(count.toLocaleString('en-US'))),
        cell(row.win_rate === null ? '–' : `${(100 * row.win_rate).toFixed(1)}%`),
      ))),
    )),
  );
}

function build() {
  const board = new Board();
  const samples = data.samples.items.length ? new Samples() : null;
  const told = samples
    ? `${data.samples.items.length.toLocaleString('en-US')} of ${data.samples.written.toLocaleString('en-US')} samples. Keys: ← → for the neighbours, / to search.`
    : 'This run wrote no samples, or none was asked for.';
  document.getElementById('report').append(
    pageHead(),
    toolBar(board, samples),
    make(
      'main', {},
      ...chartSections(board),
      leagueTable() || '',
      make('section', { id: 'samples' }, make('h2', { text: 'Samples' }), make('p', { class: 'help', text: told }), samples ? samples.node : null),
      ledgerTable() || '',
      data.config ? make('details', { class: 'config' }, make('summary', { text: 'Configuration' }), make('pre', { text: data.config })) : '',
    ),
    make('footer', { text: `Made by TorchForge ${data.run.forge} on ${moment(data.run.madeAt)}. This page is one file and asks no server for anything.` }),
  );
}

build();
