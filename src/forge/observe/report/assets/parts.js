// Parts of a page about one run: its head, its charts by section, its tables.

function brandMark() {
  return draw(
    'svg', { viewBox: '0 0 24 24', class: 'mark', 'aria-hidden': 'true' },
    draw('path', { d: 'M12 1.5c1 4.2 5.6 5.6 5.6 11a5.6 5.6 0 0 1-11.2 0c0-2.3 1-3.7 2.3-5.1.3 1.9 1 2.8 1.9 3.3C10.1 7.400 10.700 4.400 12 1.500z' }),
    draw('path', { d: 'M3.500 20.500h17v2h-17z' }),
  );
}

function progressBar(part) {
  const bar = make('div', { class: 'progress', role: 'progressbar', 'aria-valuemin': 0, 'aria-valuemax': 100, 'aria-label': 'Steps' }, make('i', {}));
  const set = (value) => {
    bar.firstChild.style.width = `${(100 * Math.min(1, value)).toFixed(1)}%`;
    bar.setAttribute('aria-valuenow', Math.round(100 * Math.min(1, value)));
  };
  set(part);
  return Object.assign(bar, { set });
}

function factList(facts) {
  return make('ul', { class: 'facts' }, ...facts.map(([label, value]) => make('li', {}, make('span', { text: label }), ` ${value}`)));
}

function noteList(notes) {
  return notes.length ? make('ul', { class: 'notes', 'data-test': 'notes' }, ...notes.map((note) => make('li', { text: note }))) : null;
}

function tile({ label, value, detail, key }, table) {
  return make('div', { class: 'tile', title: key }, make('span', { text: label }), make('b', { text: minus(value) }), make('small', { text: minus(detail) }), spark(table, key));
}

function spark(table, key) {
  const known = (table.columns[key] || []).map((value, row) => [table.steps[row], value]).filter(([, value]) => value !== null && value !== undefined);
  return sparkLine(known);
}

function sparkLine(known) {
  if (known.length < 2) return null;
  const values = known.map(([, value]) => value);
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  const high = values.reduce((most, value) => Math.max(most, value), -Infinity);
  const places = linear(known[0][0], known[known.length - 1][0], 1, 99);
  const points = smooth(known, known.length > 12 ? 0.7 : 0);
  return draw('svg', { class: 'spark', viewBox: '0 0 100 29', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, draw('path', { d: pathOf(points, places, linear(low, high, 26, 3)) }));
}

// `onMore` loads the metrics that only the section *More* shows, where they are not there yet.
function chartSections(plans, board, { onMore = null } = {}) {
  const sections = new Map();
  plans.forEach((plan) => {
    if (!sections.has(plan.section)) sections.set(plan.section, []);
    sections.get(plan.section).push(plan);
  });
  return [...sections].map(([name, found]) => (name === 'More' ? moreCharts(found, board, onMore) : make(
    'section', { class: 'charts' }, make('h2', { text: name }), make('div', { class: 'grid' }, ...found.map((plan) => new Chart(plan, board).node)),
  )));
}

// The metrics that no chart above shows are drawn when they are asked for: there can be hundreds.
function moreCharts(plans, board, onMore) {
  const grid = make('div', { class: 'grid' });
  const box = make('details', { class: 'more' }, make('summary', { text: `More metrics (${plans.length})` }), grid);
  box.addEventListener('toggle', async () => {
    if (box.open && onMore) await onMore();
    if (box.open && !grid.childElementCount) grid.append(...plans.map((plan) => new Chart(plan, board).node));
  });
  return box;
}

function ledgerTable(ledger) {
  const outcomes = Object.entries(ledger);
  if (!outcomes.length) return null;
  const all = outcomes.reduce((sum, [, count]) => sum + count, 0);
  return make(
    'section', { class: 'became' }, make('h2', { text: 'What became of the groups' }),
    make('div', { class: 'card ledger' }, make('table', {}, make('tbody', {}, ...outcomes.map(([outcome, count]) => make(
      'tr', {}, make('th', { scope: 'row', text: outcome }), make('td', { text: count.toLocaleString('en-US') }), make('td', { text: `${((100 * count) / all).toFixed(1)}%` }),
    ))))),
  );
}

function leagueTable({ members, step }) {
  if (!members) return null;
  const cell = (text) => make('td', { text });
  const fixed = (value, digits, unit = '') => (typeof value === 'number' ? `${value.toFixed(digits)}${unit}` : '–');
  return make(
    'section', { 'data-test': 'league' }, make('h2', { text: 'League' }),
    make('p', { class: 'help', text: `After step ${step}: games of the live policy against each member. A draw counts half; in the win rate recent games count more.` }),
    make('div', { class: 'card ledger' }, make(
      'table', {},
      make('thead', {}, make('tr', {}, ...['opponent', 'Elo', 'games', 'wins', 'draws', 'losses', 'win rate'].map((text) => make('th', { scope: 'col', text })))),
      make('tbody', {}, ...members.map((row) => make(
        'tr', {}, make('th', { scope: 'row', text: row.member }), cell(fixed(row.rating, 0)), ...[row.games, row.wins, row.draws, row.losses].map((count) => cell(count === null ? '–' : count.toLocaleString('en-US'))),
        cell(row.win_rate === null ? '–' : fixed(100 * row.win_rate, 1, '%')),
      ))),
    )),
  );
}
