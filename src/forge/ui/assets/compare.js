// Two to eight runs beside each other.

const MOST_COMPARED = 8;
const COMPARED = { charts: 'Charts', values: 'Values', configuration: 'Configuration' };

function compareAddress(ids, query = {}) {
  const known = new URLSearchParams(ids.map((id) => ['run', id]));
  Object.entries(query).forEach(([name, value]) => known.append(name, value));
  return known.size ? `/compare?${known}` : '/compare';
}

class CompareView {
  constructor(shell, place) {
    const ids = [...new Set(place.query.getAll('run'))];
    Object.assign(this, { shell, ids: ids.slice(0, MOST_COMPARED), numLeftOut: Math.max(0, ids.length - MOST_COMPARED), listVersion: 0, known: [], wantsMore: false, isClosed: false, runs: [] });
    this.view = COMPARED[place.view] ? place.view : 'charts';
    this.isGrouped = place.query.get('group') === 'seed';
    this.head = make('div', { class: 'runhead' });
    this.tabs = make('nav', { class: 'tabs', 'aria-label': 'Views' });
    this.body = make('div', { class: 'runbody compared' });
    this.node = make('div', { class: 'page' }, this.head, this.tabs, this.body);
    this.board = new CompareBoard([]);
    document.title = 'Compare · TorchForge';
    this.begin(place.query);
  }

  get keys() {
    return { '/': () => this.filter?.focus(), Escape: () => { this.board.point(null, true); this.board.show({ range: null }); } };
  }

  close() {
    this.isClosed = true;
    this.news?.close();
  }

  async begin(query) {
    try {
      await this.load();
    } catch (error) {
      if (!this.isClosed) this.node.replaceChildren(refused(error));
      return;
    }
    if (this.isClosed) return;
    this.recall(query);
    this.renderHead();
    this.renderTabs();
    this.renderView();
    this.board.listeners.push((board, change) => this.changed(change));
    if (this.board.range) this.loadDetail();
    this.news = new News(() => this.heardSoFar(), (name, data) => this.hear(name, data), (isUp) => this.shell.connected(isUp));
  }

  // ---- Data ------------------------------------------------------------------------------------------------------

  async load() {
    this.found = this.ids.length ? await ask('compare', { run: this.ids }) : { runs: [], charts: [], values: [], groups: [], missing: [] };
    const ids = this.found.runs.map(({ summary }) => summary.id);
    const labels = ids.length ? shortLabels(ids) : [];
    this.runs = this.found.runs.map(({ summary }, tone) => ({ id: summary.id, label: labels[tone], tone, summary, table: null, tableId: null, detail: null, isHidden: false }));
    await Promise.all(this.runs.map((run) => this.loadTable(run)));
    this.board.runs = this.runs;
    this.board.look();
  }

  async loadTable(run) {
    const found = await ask('metrics', { run: run.id, points: POINTS, more: this.wantsMore ? 1 : null });
    if (run.table) run.table.take(found);
    else run.table = new Table(found);
    run.tableId = found.table;
  }

  heardSoFar() {
    const after = ({ table: { steps } }) => (steps.length ? steps[steps.length - 1] : 0);
    return { version: this.listVersion, run: this.runs.map(({ id }) => id), table: this.runs.map(({ tableId }) => tableId), after: this.runs.map(after) };
  }

  async loadDetail() {
    const { board } = this;
    const { range } = board;
    await Promise.all(this.runs.filter(({ table }) => range && table.stride > 1).map(async (run) => {
      const detail = await detailOf(run.table, board, { run: run.id, points: POINTS, more: this.wantsMore ? 1 : null });
      if (board.range === range) run.detail = detail;
    }));
    if (board.range === range && range) board.draw();
  }

  hear(name, data) {
    if (name === 'list') {
      this.listVersion = data.version;
      this.known = [...new Set([...this.known, ...data.runs.map(({ id }) => id)])].filter((id) => !data.gone.includes(id));
      this.offer();
      return;
    }
    const run = this.runs.find(({ id }) => id === (name === 'rows' ? data.run : data.summary.id));
    if (!run) return;
    if (name === 'rows') {
      if (data.table !== run.tableId || !data.steps.length) return;
      run.table.append(data);
      this.board.draw();
      if (run.table.length > 2.5 * POINTS) this.reload(run);
      return;
    }
    const wasState = JSON.stringify([run.summary.state, run.summary.step]);
    run.summary = data.summary;
    if (JSON.stringify([data.summary.state, data.summary.step]) !== wasState) {
      this.renderChips();
      this.refreshSoon();
    }
    if (data.table !== run.tableId) this.reload(run);
  }

  reload(run) {
    run.reloading ||= this.loadTable(run).then(() => {
      run.reloading = null;
      if (this.isClosed) return;
      this.board.draw();
      this.news.again();
    }, () => { run.reloading = null; });
  }

  // Asks again for the values and the charts that there are: once for all that came within a moment.
  refreshSoon() {
    this.refreshing ||= setTimeout(async () => {
      const found = await ask('compare', { run: this.ids }).catch(() => null);
      this.refreshing = null;
      if (!found || this.isClosed) return;
      const before = JSON.stringify([this.found.charts, this.found.groups]);
      this.found = found;
      if (this.view === 'values') this.part?.take(found);
      else if (this.view === 'charts' && JSON.stringify([found.charts, found.groups]) !== before) this.renderCharts();
    }, 1000);
  }

  // ---- The head --------------------------------------------------------------------------------------------------

  renderHead() {
    this.chips = make('ul', { class: 'compareruns', 'aria-label': 'Runs', 'data-test': 'compared' });
    this.names = make('datalist', { id: 'known-runs' });
    this.more = make('input', { type: 'search', list: 'known-runs', placeholder: 'Add a run', 'aria-label': 'Add a run' });
    this.more.addEventListener('change', () => this.add(this.more.value.trim()));
    const notes = [
      ...(this.found.missing.map((id) => `There is no run ${id} here.`)),
      ...(this.numLeftOut ? [`${MOST_COMPARED} runs can be compared at a time; ${this.numLeftOut} more are left out.`] : []),
      ...(this.runs.length < 2 ? ['Choose two to eight runs: add them here, or tick them in the list of runs.'] : []),
    ];
    this.head.replaceChildren(...[
      make('div', { class: 'headline' }, make('h1', { text: this.runs.length ? `${this.runs.length} runs` : 'Compare runs' })),
      this.chips, this.names, noteList(notes),
    ].filter((node) => node));
    this.renderChips();
    this.offer();
  }

  offer() {
    this.names?.replaceChildren(...this.known.filter((id) => !this.ids.includes(id)).map((id) => make('option', { value: id })));
  }

  renderChips() {
    const chip = (run) => {
      const { id, label, tone, summary, isHidden } = run;
      const toggle = make('button', { type: 'button', class: 'toggle', 'aria-pressed': String(!isHidden), title: isHidden ? 'Show its curves' : 'Hide its curves' }, make('i', { 'aria-hidden': 'true' }), make('span', { text: label }));
      toggle.addEventListener('click', () => this.hide(run));
      const node = make(
        'li', { class: `tone${this.toneOf(run) % 8}`, 'data-run': id }, toggle, statePill(summary.state), make('small', { text: summary.step === null ? 'no step yet' : `step ${summary.step.toLocaleString('en-US')}` }),
        link(placeOf(id), { text: '↗', title: `Open ${id}`, 'aria-label': `Open ${id}` }), make('button', { type: 'button', class: 'drop', 'aria-label': `Leave out ${id}`, text: '×', on: { click: () => this.leaveOut(id) } }),
      );
      node.addEventListener('pointerenter', () => this.emphasise(this.toneOf(run)));
      node.addEventListener('pointerleave', () => this.emphasise(null));
      return node;
    };
    const focused = this.chips.contains(document.activeElement) ? document.activeElement.closest('[data-run]').dataset.run : null;
    const nodes = this.runs.map(chip);
    const isTyping = document.activeElement === this.more;
    this.chips.replaceChildren(...nodes, ...(this.ids.length < MOST_COMPARED ? [make('li', { class: 'adding' }, this.more)] : []));
    if (isTyping) this.more.focus();
    if (focused !== null) nodes.find(({ dataset }) => dataset.run === focused)?.querySelector('.toggle').focus();
  }

  toneOf(run) {
    return this.isGrouped ? this.found.groups.findIndex((members) => members.includes(this.runs.indexOf(run))) : run.tone;
  }

  // Lets one run stand out in all charts.
  emphasise(tone) {
    if (tone === null) delete this.body.dataset.hot;
    else this.body.dataset.hot = tone % 8;
  }

  hide(run) {
    run.isHidden = !run.isHidden;
    keep({ hide: this.runs.filter(({ isHidden }) => isHidden).map(({ tone }) => tone + 1).join('~') });
    this.renderChips();
    this.board.show({});
  }

  add(id) {
    if (id && !this.ids.includes(id)) go(compareAddress([...this.ids, id], this.others()));
  }

  leaveOut(id) {
    go(compareAddress(this.ids.filter((each) => each !== id), this.others()));
  }

  // What the address has besides the runs.
  others() {
    const query = new URLSearchParams(location.search);
    ['run', 'hide'].forEach((name) => query.delete(name));
    return Object.fromEntries(query);
  }

  // ---- Views -----------------------------------------------------------------------------------------------------

  renderTabs() {
    this.tabs.replaceChildren(...Object.entries(COMPARED).map(([view, label]) => link(compareAddress(this.ids, view === 'charts' ? {} : { view }), { 'aria-current': view === this.view ? 'page' : null, text: label })));
  }

  // Shows another view of the same runs; false if the address has other runs.
  turn(place) {
    const ids = [...new Set(place.query.getAll('run'))];
    if (ids.join('\n') !== this.ids.join('\n')) return false;
    this.view = COMPARED[place.view] ? place.view : 'charts';
    if (!this.chips) return true;
    this.recall(place.query);
    this.renderTabs();
    this.renderView();
    return true;
  }

  renderView() {
    this.board.charts = [];
    this.board.listeners = this.board.listeners.filter((listener) => !listener.isOfView);
    this.part = null;
    if (!this.runs.length) this.body.replaceChildren();
    else if (this.view === 'charts') this.renderChartView();
    else {
      this.part = this.view === 'values' ? new ValuesTable(this) : new ConfigurationsTable(this);
      this.filter = this.part.filter;
      this.body.replaceChildren(this.part.node);
    }
  }

  renderChartView() {
    this.filter = make('input', { type: 'search', class: 'filter', placeholder: 'Filter charts ( / )', 'aria-label': 'Filter charts' });
    this.filter.addEventListener('input', () => filterCharts(this.sections, this.filter.value));
    this.sections = make('div', { class: 'sections' });
    this.seeds = make('div', { class: 'seeds' });
    const before = this.board.listeners.length;
    const bar = toolBar(this.board, { more: [this.seeds, this.filter] });
    this.board.listeners.slice(before).forEach((listener) => { listener.isOfView = true; });
    this.body.replaceChildren(bar, this.sections);
    this.renderCharts();
  }

  renderSeeds() {
    const numRepeated = this.found.groups.filter((members) => members.length > 1).length;
    if (!numRepeated) {
      this.seeds.replaceChildren();
      return;
    }
    const button = make('button', { type: 'button', class: 'switch', 'aria-pressed': String(this.isGrouped), text: 'mean over seeds', title: 'Runs whose configurations differ in nothing but seeds and names are drawn as their mean' });
    button.addEventListener('click', () => this.group(!this.isGrouped));
    const bands = make('select', { 'aria-label': 'Band' }, ...Object.entries(BANDS).map(([band, label]) => make('option', { value: band, text: `band: ${label}`, selected: band === this.board.band })));
    bands.addEventListener('change', () => { keep({ band: bands.value === 'range' ? '' : bands.value }); this.board.show({ band: bands.value }); });
    bands.hidden = !this.isGrouped;
    this.seeds.replaceChildren(button, bands);
  }

  group(isGrouped) {
    this.isGrouped = isGrouped;
    keep({ group: isGrouped ? 'seed' : '' });
    this.renderChips();
    this.renderCharts();
  }

  renderCharts() {
    this.board.charts = [];
    this.renderSeeds();
    const groups = this.isGrouped ? this.found.groups.map((members) => members.map((number) => this.runs[number])) : null;
    const plans = comparePlans(this.found.charts.filter(({ section }) => section !== 'More'), this.runs, groups);
    const rest = this.found.charts.filter(({ section }) => section === 'More');
    const note = groups ? make('p', { class: 'help', 'data-test': 'groups', text: this.groupText(groups) }) : null;
    const more = rest.length ? this.moreCharts(rest, groups) : null;
    this.sections.replaceChildren(...[note, ...compareSections(plans, this.board), more].filter((node) => node));
    if (!plans.length) this.sections.append(make('p', { class: 'card help', text: 'None of these runs has finished a step yet.' }));
    filterCharts(this.sections, this.filter.value);
  }

  groupText(groups) {
    const told = groups.filter((members) => members.length > 1).map((members) => `${members.map(({ label }) => label).join(', ')}: mean of ${members.length} runs`);
    return `${told.join('; ')}. They differ only in their seeds. Where a run has ended, the mean is that of the others; between two points its curve is a straight line.`;
  }

  moreCharts(plans, groups) {
    const grid = make('div', { class: 'grid' });
    const box = make('details', { class: 'more' }, make('summary', { text: `More metrics (${plans.length})` }), grid);
    box.addEventListener('toggle', async () => {
      if (!box.open || grid.childElementCount) return;
      if (!this.wantsMore) {
        this.wantsMore = true;
        await Promise.all(this.runs.map((run) => this.loadTable(run)));
        this.news.again();
      }
      grid.replaceChildren(...comparePlans(plans, this.runs, groups).map((plan) => new CompareChart(plan, this.board).node));
    });
    return box;
  }

  // ---- The address -----------------------------------------------------------------------------------------------

  recall(query) {
    recallBoard(this.board, query);
    const hidden = (query.get('hide') || '').split('~').map(Number);
    this.runs.forEach((run) => { run.isHidden = hidden.includes(run.tone + 1); });
    this.board.band = BANDS[query.get('band')] ? query.get('band') : 'range';
    this.isGrouped = query.get('group') === 'seed' && this.found.groups.some((members) => members.length > 1);
  }

  changed(change) {
    if ('range' in change || 'axis' in change) this.loadDetail();
    if ('pin' in change && change.pin === undefined && !this.wasPinned) return; // the pointer moves
    this.wasPinned = this.board.pinned;
    keepBoard(this.board);
  }
}

function compareSections(plans, board) {
  const sections = new Map();
  plans.forEach((plan) => sections.set(plan.section, [...(sections.get(plan.section) || []), plan]));
  return [...sections].map(([name, found]) => make(
    'section', { class: 'charts' }, make('h2', { text: name }), make('div', { class: 'grid' }, ...found.map((plan) => new CompareChart(plan, board).node)),
  ));
}
