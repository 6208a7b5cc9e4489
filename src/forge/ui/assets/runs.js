// The list of runs: which are there, how they are doing, and how far they are.

const SORTS = {
  changed: { label: 'Activity', value: (run) => -(isAlive(run) ? 1e12 : 0) - (run.changed ?? 0) },
  name: { label: 'Run', value: (run) => run.id.toLowerCase() },
  step: { label: 'Steps', value: (run) => -(run.step ?? -1) },
  value: { label: 'Result', value: (run) => -(run.value ?? -Infinity) },
};
const SHOWN = 300;

function isAlive(run) {
  return run.state.kind === 'running' || run.state.kind === 'starting';
}

function matches(run, words) {
  const hay = [run.id, run.name, run.model, run.algorithm, run.kind, STATES[run.state.kind], run.state.num_resumes ? 'resumed' : '', ...run.tags].join(' ').toLowerCase();
  return words.every((word) => hay.includes(word));
}

class RunsView {
  constructor(shell, place) {
    Object.assign(this, { shell, runs: new Map(), rows: new Map(), version: 0, limit: SHOWN, chosen: null, ticked: new Set() });
    this.state = { query: place.query.get('q') || '', kind: place.query.get('state') || '', sort: SORTS[place.query.get('sort')] ? place.query.get('sort') : 'changed' };
    this.chips = make('div', { class: 'chipbar', role: 'group', 'aria-label': 'State' });
    this.search = make('input', { type: 'search', value: this.state.query, placeholder: 'Search name, model, algorithm, tag  ( / )', 'aria-label': 'Search runs' });
    this.search.addEventListener('input', () => this.change({ query: this.search.value }));
    this.body = make('div', { class: 'runlist', role: 'table', 'aria-label': 'Runs', 'data-test': 'runs' });
    this.note = make('p', { class: 'help', 'data-test': 'note' });
    this.root = make('p', { class: 'where' });
    this.tray = make('div', { class: 'tray', role: 'region', 'aria-label': 'Compare', hidden: true, 'data-test': 'tray' });
    this.node = make('div', { class: 'page' }, make('div', { class: 'headline' }, make('h1', { text: 'Runs' }), this.root), make('div', { class: 'listbar' }, this.chips, this.search), this.body, this.note, this.tray);
    this.keys = {
      '/': () => this.search.focus(), j: () => this.move(1), k: () => this.move(-1), ArrowDown: () => this.move(1), ArrowUp: () => this.move(-1),
      x: () => this.tick(this.chosen), c: () => this.compare(),
    };
    document.title = 'Runs · TorchForge';
    this.news = new News(() => ({ version: this.version }), (name, data) => { if (name === 'list') this.take(data); }, (isUp) => shell.connected(isUp));
  }

  close() {
    this.news.close();
  }

  take({ version, root, runs, gone, isComplete, isCut }) {
    if (version < this.version) this.runs.clear(); // another server
    this.version = version;
    runs.forEach((run) => this.runs.set(run.id, run));
    gone.forEach((id) => { this.runs.delete(id); this.ticked.delete(id); });
    this.root.textContent = root;
    Object.assign(this, { isComplete, isCut });
    this.render();
  }

  change(change) {
    Object.assign(this.state, change);
    this.limit = SHOWN;
    const { query, kind, sort } = this.state;
    keep({ q: query, state: kind, sort: sort === 'changed' ? '' : sort });
    this.render();
  }

  render() {
    const all = [...this.runs.values()];
    const words = this.state.query.toLowerCase().split(/\s+/).filter((word) => word);
    const matching = all.filter((run) => matches(run, words));
    const { value } = SORTS[this.state.sort];
    const found = matching.filter((run) => this.state.kind === '' || run.state.kind === this.state.kind)
      .map((run) => [value(run), run])
      .sort(([one, a], [other, b]) => (one < other ? -1 : one > other ? 1 : a.id < b.id ? -1 : 1))
      .map(([, run]) => run);
    this.renderChips(matching);
    this.found = found;
    const rows = found.slice(0, this.limit).map((run) => this.row(run));
    this.body.replaceChildren(this.head(), ...rows);
    const more = found.length - rows.length;
    this.note.replaceChildren(...this.told(all, found), ...(more > 0 ? [make('button', { type: 'button', text: `show ${Math.min(more, SHOWN)} more`, on: { click: () => { this.limit += SHOWN; this.render(); } } })] : []));
  }

  told(all, found) {
    if (!all.length) return [this.isComplete ? 'No run is here yet. A run appears when it has begun: forge run … writes to run.output_dir.' : 'Looking for runs…'];
    if (!found.length) return ['No run is like that.'];
    return [this.isComplete ? '' : 'Reading the runs… ', this.isCut ? 'There are more runs than can be listed; choose a folder further down.' : ''];
  }

  renderChips(runs) {
    const counts = new Map();
    runs.forEach(({ state: { kind } }) => counts.set(kind, (counts.get(kind) || 0) + 1));
    const chip = (kind, label, count) => make(
      'button', { type: 'button', class: `chip ${kind}`, 'aria-pressed': String(this.state.kind === kind), on: { click: () => this.change({ kind }) } },
      kind ? make('i', { 'aria-hidden': 'true' }) : null, `${label} `, make('b', { text: count.toLocaleString('en-US') }),
    );
    const kinds = Object.keys(STATES).filter((kind) => counts.has(kind) || kind === this.state.kind);
    const chips = [chip('', 'all', runs.length), ...kinds.map((kind) => chip(kind, STATES[kind], counts.get(kind) || 0))];
    const text = chips.map((each) => `${each.textContent}${each.getAttribute('aria-pressed')}`).join();
    if (text === this.chipText) return; // a button that is replaced loses the focus
    this.chipText = text;
    this.chips.replaceChildren(...chips);
  }

  head() {
    const cell = (sort, name) => make(
      'div', { role: 'columnheader', class: name, 'aria-sort': sort === this.state.sort ? 'ascending' : 'none' },
      make('button', { type: 'button', text: SORTS[sort].label, on: { click: () => this.change({ sort }) } }),
    );
    return make('div', { class: 'runrow head', role: 'row' }, cell('name', 'what'), make('div', { role: 'columnheader', class: 'how', text: 'State' }), cell('step', 'far'), cell('value', 'result'), cell('changed', 'when'));
  }

  row(run) {
    const known = this.rows.get(run.id);
    if (known && known.run === run) {
      known.node.classList.toggle('chosen', run.id === this.chosen);
      return known.node;
    }
    const address = placeOf(run.id);
    const facts = [run.kind === 'evaluation' ? 'evaluation' : run.algorithm, run.model].filter((word) => word).join(' · ');
    const node = make(
      'div', { class: `runrow${run.id === this.chosen ? ' chosen' : ''}`, role: 'row', 'data-run': run.id },
      make('div', { role: 'cell', class: 'what' }, this.box(run), link(address, { class: 'open', text: run.id === '.' ? run.name : run.id }), make('small', { text: facts }), tagList(run.tags)),
      make('div', { role: 'cell', class: 'how' }, statePill(run.state)),
      make('div', { role: 'cell', class: 'far' }, ...this.progress(run)),
      make('div', { role: 'cell', class: 'result' }, make('b', { text: run.value === null ? '–' : figure(run.value) }), make('small', { text: run.metric }), sparkLine(run.spark.map((value, at) => [at, value]))),
      make('div', { role: 'cell', class: 'when' }, agoNode(run.changed), make('small', { text: run.started !== null && run.changed > run.started ? span(run.changed - run.started) : '' })),
    );
    node.addEventListener('click', (event) => { if (!event.target.closest('a, button, input') && !String(getSelection())) go(address); });
    this.rows.set(run.id, { run, node });
    return node;
  }

  // ---- Choosing runs to compare ----------------------------------------------------------------------------------

  box({ id }) {
    const box = make('input', { type: 'checkbox', class: 'tick', checked: this.ticked.has(id), 'aria-label': `Compare ${id}`, title: 'Compare (x)' });
    box.addEventListener('change', () => this.tick(id));
    return box;
  }

  tick(id) {
    if (id === null || !this.runs.has(id)) return;
    if (!this.ticked.delete(id)) this.ticked.add(id);
    const box = this.rows.get(id)?.node.querySelector('.tick');
    if (box) box.checked = this.ticked.has(id);
    const count = this.ticked.size;
    const told = count < 2 ? 'Tick another run to compare' : count > MOST_COMPARED ? `${MOST_COMPARED} runs can be compared at a time` : `Compare ${count} runs`;
    this.tray.hidden = !count;
    this.tray.replaceChildren(
      count < 2 || count > MOST_COMPARED ? make('span', { text: told }) : link(compareAddress([...this.ticked]), { class: 'act', text: told }),
      make('button', { type: 'button', text: 'untick all', on: { click: () => [...this.ticked].forEach((each) => this.tick(each)) } }),
    );
  }

  compare() {
    if (this.ticked.size >= 2 && this.ticked.size <= MOST_COMPARED) go(compareAddress([...this.ticked]));
  }

  progress({ step, total_steps: total, kind }) {
    if (kind === 'evaluation') return [make('small', { text: '' })];
    const text = step === null ? '–' : `${step.toLocaleString('en-US')}${total ? ` / ${total.toLocaleString('en-US')}` : ''}`;
    return [make('span', { text }), total && step !== null ? progressBar(step / total) : ''];
  }

  move(by) {
    const at = this.found.findIndex(({ id }) => id === this.chosen);
    const next = this.found[Math.min(this.found.length - 1, Math.max(0, at + by))];
    if (!next) return;
    this.chosen = next.id;
    this.render();
    this.body.querySelector('.chosen .open').focus();
  }
}
