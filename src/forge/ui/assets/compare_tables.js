// Several runs beside each other as tables: what their metrics came to, and in which keys their configurations differ.

// A table that scrolls by itself where the screen is narrow, with the first column always in view.
function wideTable(head, rows, properties) {
  return make('div', { class: 'card wide', tabindex: 0, role: 'region', ...properties }, make('table', {}, make('thead', {}, make('tr', {}, ...head)), make('tbody', {}, ...rows)));
}

function runHeads(runs, toneOf) {
  return runs.map((run) => make('th', { scope: 'col', class: `tone${toneOf(run) % 8}`, title: run.id }, make('i', { 'aria-hidden': 'true' }), make('span', { text: run.label })));
}

class ValuesTable {
  constructor(compared) {
    Object.assign(this, { compared, query: '', isBest: false });
    this.filter = make('input', { type: 'search', placeholder: 'Filter metrics ( / )', 'aria-label': 'Filter metrics' });
    this.filter.addEventListener('input', () => { this.query = this.filter.value.toLowerCase(); this.render(); });
    this.kind = make('select', { 'aria-label': 'Which values' }, make('option', { value: 'final', text: 'final values' }), make('option', { value: 'best', text: 'best values' }));
    this.kind.addEventListener('change', () => { this.isBest = this.kind.value === 'best'; this.render(); });
    this.help = make('p', { class: 'help' });
    this.body = make('div', {});
    this.node = make('div', {}, make('div', { class: 'listbar' }, this.kind, this.filter), this.help, this.body);
    this.take(compared.found);
  }

  take(found) {
    this.values = found.values;
    this.render();
  }

  render() {
    const { runs, found } = this.compared;
    const rows = this.values.filter(({ key, better }) => key.toLowerCase().includes(this.query) && (!this.isBest || better));
    const groups = found.groups.filter((members) => members.length > 1);
    this.help.textContent = this.isBest
      ? 'The best value of each metric and its step, where it is known which direction is better. The best run of a row is marked.'
      : 'The last evaluation, or the mean of the last five steps. The best run of a row is marked, where it is known which direction is better.';
    const groupHeads = groups.map((members) => make('th', { scope: 'col', title: members.map((number) => runs[number].id).join(', '), text: `mean ± deviation of ${members.length} seeds` }));
    const head = [make('th', { scope: 'col', text: 'metric' }), ...runHeads(runs, (run) => this.compared.toneOf(run)), ...groupHeads];
    this.body.replaceChildren(wideTable(head, rows.map((row) => this.row(row, groups)), { 'data-test': 'values', 'aria-label': 'Values' }));
  }

  number(row, cell) {
    if (!cell) return null;
    return this.isBest ? (row.better === 'higher' ? cell.high : cell.low)[0] : cell.final;
  }

  row(row, groups) {
    const numbers = row.cells.map((cell) => this.number(row, cell));
    const known = numbers.filter((value) => value !== null);
    const best = row.better === 'higher' ? Math.max(...known) : row.better === 'lower' ? Math.min(...known) : null;
    const unit = this.compared.found.charts.find(({ series }) => series.some(({ key }) => key === row.key))?.unit;
    const cells = row.cells.map((cell, number) => {
      if (!cell) return make('td', { text: '–' });
      const step = this.isBest ? (row.better === 'higher' ? cell.high : cell.low)[1] : cell.step;
      return make('td', { class: best !== null && known.length > 1 && numbers[number] === best ? 'best' : '', title: `step ${step.toLocaleString('en-US')}` }, make('b', { text: figure(numbers[number], unit) }), make('small', { text: ` at ${step.toLocaleString('en-US')}` }));
    });
    return make('tr', {}, make('th', { scope: 'row', text: row.key }), ...cells, ...groups.map((members) => this.groupCell(members.map((number) => numbers[number]).filter((value) => value !== null), unit)));
  }

  groupCell(values, unit) {
    if (!values.length) return make('td', { text: '–' });
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const deviation = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length);
    return make('td', {}, make('b', { text: figure(mean, unit) }), make('small', { text: ` ± ${figure(deviation, unit)}` }));
  }
}

class ConfigurationsTable {
  constructor(compared) {
    Object.assign(this, { compared, query: '', onlyDifferent: true });
    this.filter = make('input', { type: 'search', placeholder: 'Filter keys and values ( / )', 'aria-label': 'Filter keys' });
    this.filter.addEventListener('input', () => { this.query = this.filter.value.toLowerCase(); this.render(); });
    this.only = make('input', { type: 'checkbox', checked: true });
    this.only.addEventListener('change', () => { this.onlyDifferent = this.only.checked; this.render(); });
    this.help = make('p', { class: 'help' });
    this.body = make('div', {});
    this.node = make('div', {}, make('div', { class: 'listbar' }, make('label', { class: 'check' }, this.only, 'only what differs'), this.filter), this.help, this.body);
    this.load();
  }

  async load() {
    try {
      this.found = await ask('compare/config', { run: this.compared.runs.map(({ id }) => id) });
    } catch (error) {
      this.help.textContent = error.message;
      return;
    }
    this.render();
  }

  render() {
    if (!this.found) return;
    const { runs } = this.compared;
    const differs = ({ values, changes }) => values.some((value) => value !== values[0]) || changes.some((each) => JSON.stringify(each) !== JSON.stringify(changes[0]));
    const rows = this.found.rows.filter((row) => (!this.onlyDifferent || differs(row)) && `${row.key} ${row.values.join(' ')}`.toLowerCase().includes(this.query));
    const count = this.found.rows.filter(differs).length;
    this.help.textContent = [...this.found.notes, `${count.toLocaleString('en-US')} of ${this.found.rows.length.toLocaleString('en-US')} keys differ. “preset”: what the presets and defaults of that run give; “set”: its configuration says otherwise.`].join(' ');
    const head = [make('th', { scope: 'col', text: 'key' }), ...runHeads(runs, (run) => this.compared.toneOf(run))];
    this.body.replaceChildren(rows.length ? wideTable(head, rows.map((row) => this.row(row)), { 'data-test': 'configurations', 'aria-label': 'Configurations' }) : make('p', { class: 'card help', 'data-test': 'configurations', text: this.query ? 'No key is like that.' : 'Nothing differs.' }));
  }

  row({ key, values, origins, changes }) {
    const cells = values.map((value, number) => make(
      'td', { class: origins[number] },
      make('code', { class: value === null ? 'unset' : '', text: value ?? 'not set' }), origins[number] ? make('small', { title: origins[number] === 'preset' ? this.found.presets[number] : '', text: origins[number] }) : null,
      ...changes[number].map(([step, after]) => make('small', { class: 'later', text: `${JSON.stringify(after)} after step ${step}` })),
    ));
    return make('tr', {}, make('th', { scope: 'row', text: key }), ...cells);
  }
}
