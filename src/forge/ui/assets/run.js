// One run: its head, and below it the view that is chosen.

const POINTS = 700;

// The views of a run, with the place of their tabs: what each is called, and `make(run, place)`, which returns a part: its
// `node`, and where it has them its `keys`, `close()`, `refresh()`, when the run is described anew, and `hear(status)`,
// with each step; and `turnTo(place)`, for another address of the same view. A file of a view adds its own.
// `isThere(description)` says whether a run has it, `isEarly` that it needs nothing of what is asked for first.
const VIEWS = {
  charts: { at: 0, label: 'Charts' },
  rollouts: { at: 10, label: 'Rollouts', isEarly: true, make: (run, place) => new RolloutsView(run.id, place), isThere: ({ hasRollouts, status }) => hasRollouts || status.summary.kind !== 'fine-tuning' },
  configuration: { at: 40, label: 'Configuration', make: (run, place) => new ConfigurationView(run.id, run.runs, place) },
  events: { at: 50, label: 'Events', make: (run, place) => new EventsView(run, place) },
};

class RunView {
  constructor(shell, place) {
    Object.assign(this, { shell, id: place.run, view: VIEWS[place.view] ? place.view : 'charts', table: null, tableId: null, runs: [], listVersion: 0, wantsMore: false, isClosed: false });
    this.head = make('div', { class: 'runhead' });
    this.tabs = make('nav', { class: 'tabs', 'aria-label': 'Views' });
    this.body = make('div', { class: 'runbody' });
    this.node = make('div', { class: 'page' }, this.head, this.tabs, this.body);
    this.begin(place);
  }

  get keys() {
    return { ...(this.view === 'charts' ? { '/': () => this.filter.focus(), Escape: () => { this.board.point(null, true); this.board.show({ range: null }); } } : this.part?.keys || {}) };
  }

  close() {
    this.isClosed = true;
    this.news?.close();
    this.part?.close?.();
  }

  async begin(place) {
    this.isBegun = VIEWS[this.view].isEarly === true;
    if (this.isBegun) {
      this.renderTabs();
      this.renderPart(place);
    }
    try {
      const [description] = await Promise.all([ask('run', { run: this.id }), this.loadTable()]);
      this.description = description;
    } catch (error) {
      if (!this.isClosed) this.refuse(error);
      return;
    }
    if (this.isClosed) return;
    this.board = new Board(this.table, { lazy: true });
    this.recall(place.query);
    this.renderTabs();
    this.renderHead();
    this.renderView(place);
    this.board.listeners.push((board, change) => this.changed(change));
    if (this.board.range) this.loadDetail();
    this.news = new News(() => this.known(), (name, data) => this.hear(name, data), (isUp) => this.shell.connected(isUp));
  }

  // Shows why there is nothing. A run that has not begun yet is shown when it has.
  refuse(error) {
    this.news?.close();
    this.part?.close?.();
    this.node.replaceChildren(refused(error));
    document.title = 'TorchForge';
    if (error.status !== 404) return;
    this.news = new News(() => ({}), (name, { runs }) => {
      if (name === 'list' && runs.some(({ id }) => id === this.id)) this.shell.again();
    }, (isUp) => this.shell.connected(isUp));
  }

  // ---- Data ------------------------------------------------------------------------------------------------------

  known() {
    const { steps } = this.table;
    return { run: this.id, version: this.listVersion, table: this.tableId, after: steps.length ? steps[steps.length - 1] : 0 };
  }

  async loadTable() {
    const found = await ask('metrics', { run: this.id, points: POINTS, more: this.wantsMore ? 1 : null });
    if (this.table) this.table.take(found);
    else this.table = new Table(found);
    this.tableId = found.table;
    this.progress = found.isPartial ? found.progress : 1;
  }

  // Loads the table again, once for any number of requests, and continues with the news after it.
  reload() {
    this.reloading ||= this.loadTable().then(() => {
      this.reloading = null;
      if (this.isClosed) return;
      this.board.draw();
      this.renderProgress();
      this.news.again();
    }, (error) => {
      this.reloading = null;
      if (error instanceof Refusal) this.refuse(error); // else the server is gone, which the bar at the top says
    });
    return this.reloading;
  }

  // The part of the run that is looked at, in more detail than all of it.
  async loadDetail() {
    const { board } = this;
    const { range } = board;
    if (!range || (this.table.stride <= 1 && this.progress >= 1)) return;
    const detail = await detailOf(this.table, board, { run: this.id, points: POINTS, more: this.wantsMore ? 1 : null });
    if (!detail || board.range !== range) return;
    board.detail = detail;
    board.draw();
  }

  hear(name, data) {
    if (name === 'list') {
      this.listVersion = data.version;
      this.runs = [...new Set([...this.runs, ...data.runs.map(({ id }) => id)])].filter((id) => !data.gone.includes(id));
    } else if (name === 'rows') {
      if (data.table !== this.tableId || !data.steps.length) return;
      this.table.append(data);
      this.board.draw();
      if (this.table.length > 2.5 * POINTS) this.reload();
    } else if (name === 'run') {
      this.takeStatus(data);
    }
  }

  takeStatus(status) {
    const before = this.description.status;
    this.description.status = status;
    this.description.tiles = status.tiles;
    this.progress = status.progress;
    this.renderHead();
    this.renderProgress();
    this.renderTabs();
    if (status.table !== this.tableId) this.reload();
    if (status.numNames !== before.numNames || status.details !== before.details) this.refresh();
    this.part?.hear?.(status);
  }

  // Asks again for what changes seldom.
  async refresh() {
    const found = await ask('run', { run: this.id }).catch(() => null);
    if (!found || this.isClosed) return;
    const plans = JSON.stringify(this.description.charts);
    this.description = found;
    this.renderHead();
    this.renderTabs();
    if (this.part) this.part.refresh?.();
    else if (this.view === 'charts' && JSON.stringify(found.charts) !== plans) this.renderCharts();
    else if (this.view === 'charts') this.renderRest();
  }

  // ---- The head --------------------------------------------------------------------------------------------------

  renderHead() {
    const { run, facts, status, notes } = this.description;
    const { summary } = status;
    const step = status.numRows ? status.lastStep : null;
    const told = [stepText(step, run.totalSteps)];
    if (status.lastTime !== null) told.push(span(status.lastTime - status.firstTime));
    const left = this.timeLeft(summary, step, run.totalSteps);
    if (left !== null) told.push(`about ${span(left)} left`);
    document.title = `${step === null ? '' : `${step} · `}${summary.name} · TorchForge`;
    this.head.replaceChildren(...[
      make('div', { class: 'headline' }, make('h1', { text: summary.name }), statePill(summary.state)),
      make('p', { class: 'state' }, make('b', { text: told[0] }), ...told.slice(1).map((text) => ` · ${text}`), status.lastTime === null ? '' : ' · last metrics ', status.lastTime === null ? '' : agoNode(status.lastTime)),
      run.totalSteps && step !== null && step < run.totalSteps ? progressBar(step / run.totalSteps) : null,
      make('div', { class: 'factline' }, factList(facts), tagList(summary.tags)),
      make('div', { class: 'tiles' }, ...status.tiles.map((each) => tile(each, this.table))),
      noteList([...notes, ...(summary.state.kind === 'unknown' || summary.state.kind === 'failed' ? [`${STATES[summary.state.kind]}: ${summary.state.detail}.`] : [])]),
    ].filter((node) => node));
  }

  // Seconds until the last step, by the time of the last steps.
  timeLeft(summary, step, total) {
    const { times, steps } = this.table;
    if (!isAlive(summary) || !total || step === null || step >= total || steps.length < 2) return null;
    const from = Math.max(0, steps.length - 21);
    const perStep = (times[times.length - 1] - times[from]) / (steps[steps.length - 1] - steps[from]);
    return (total - step) * perStep;
  }

  renderTabs() {
    this.node.dataset.view = this.view;
    const there = Object.entries(VIEWS).filter(([view, { isThere }]) => view === this.view || !isThere || (this.description && isThere(this.description))).sort(([, one], [, other]) => one.at - other.at);
    const text = there.map(([view]) => `${view}${view === this.view ? '!' : ''}`).join();
    if (text === this.tabText) return; // a link that is replaced loses the focus
    this.tabText = text;
    this.tabs.replaceChildren(...there.map(([view, { label }]) => link(placeOf(this.id, { view: view === 'charts' ? '' : view }), { 'aria-current': view === this.view ? 'page' : null, text: label })));
    const chosen = this.tabs.querySelector('[aria-current]');
    if (this.tabs.scrollWidth > this.tabs.clientWidth) this.tabs.scrollLeft = chosen.offsetLeft - this.tabs.clientWidth / 3;
  }

  // Shows another view of the same run.
  turn(place) {
    if (this.view === place.view && this.part?.turnTo) {
      this.part.turnTo(place);
      return;
    }
    this.view = VIEWS[place.view] ? place.view : 'charts';
    if (!this.board) return;
    this.renderTabs();
    this.recall(place.query);
    this.renderView(place);
  }

  renderView(place) {
    const isThere = this.isBegun;
    this.isBegun = false;
    if (isThere) return;
    this.board.charts = [];
    this.board.listeners = this.board.listeners.filter((listener) => !listener.isOfView);
    this.renderPart(place);
    if (!this.part) this.renderChartView();
  }

  renderPart(place) {
    this.part?.close?.();
    const { make: open } = VIEWS[this.view];
    this.part = open ? open(this, place) : null;
    if (this.part) this.body.replaceChildren(this.part.node);
  }

  // ---- Charts ----------------------------------------------------------------------------------------------------

  renderChartView() {
    this.filter = make('input', { type: 'search', class: 'filter', placeholder: 'Filter charts ( / )', 'aria-label': 'Filter charts' });
    this.filter.addEventListener('input', () => this.filterCharts());
    this.reading = make('span', { class: 'reading-metrics', role: 'status', 'data-test': 'progress' });
    this.sections = make('div', { class: 'sections' });
    this.rest = make('div', {});
    const before = this.board.listeners.length;
    const jump = this.description.hasRollouts ? (step) => go(sampleLink(this.id, { step })) : null;
    const bar = toolBar(this.board, { jump, more: [this.reading, this.filter] });
    this.board.listeners.slice(before).forEach((listener) => { listener.isOfView = true; });
    this.body.replaceChildren(bar, this.sections, this.rest);
    this.renderProgress();
    this.renderCharts();
    this.renderRest();
  }

  renderCharts() {
    this.board.charts = [];
    const onMore = async () => {
      this.wantsMore = true;
      await this.reload();
    };
    this.sections.replaceChildren(...chartSections(this.description.charts, this.board, { onMore }));
    if (!this.description.charts.length) this.sections.replaceChildren(make('p', { class: 'card help', text: 'The run has not finished a step, so there are no curves yet. They appear here as it goes on.' }));
    this.filterCharts();
  }

  renderRest() {
    const { league, status } = this.description;
    this.rest.replaceChildren(leagueTable(league) || '', ledgerTable(status.ledger) || '');
  }

  renderProgress() {
    if (this.reading) this.reading.textContent = this.progress < 1 ? `reading metrics, ${Math.round(100 * this.progress)}%` : '';
  }

  filterCharts() {
    filterCharts(this.sections, this.filter.value);
  }

  // ---- The address -----------------------------------------------------------------------------------------------

  recall(query) {
    recallBoard(this.board, query);
  }

  changed(change) {
    if ('range' in change) this.loadDetail();
    if ('pin' in change && change.pin === undefined && !this.wasPinned) return; // the pointer moves
    this.wasPinned = this.board.pinned;
    keepBoard(this.board);
  }
}

// The rows of a table that a board shows now, in more detail; null where there is none.
async function detailOf(table, { axis, range }, parameters) {
  if (!range || !table.length || !table.has(axis)) return null;
  const first = table.steps[Math.max(0, table.after(axis, range[0]) - 1)];
  const last = table.steps[Math.min(table.length - 1, table.after(axis, range[1]))];
  const found = await ask('metrics', { ...parameters, first, last }).catch(() => null);
  if (!found) return null;
  const detail = new Table(found);
  detail.origin = table.origin;
  detail.places = {};
  return detail;
}

// Shows only charts whose title, help or metrics have these words.
function filterCharts(sections, words) {
  const query = words.toLowerCase();
  sections.querySelectorAll('.chart').forEach((node) => { node.hidden = query !== '' && !node.textContent.toLowerCase().includes(query) && ![...node.querySelectorAll('.item')].some(({ title }) => title.includes(query)); });
  sections.querySelectorAll('.charts').forEach((section) => { section.hidden = ![...section.querySelectorAll('.chart')].some((node) => !node.hidden); });
}

// Takes from the address how charts are drawn, and what is held.
function recallBoard(board, query) {
  const axis = query.get('x');
  board.axis = AXES[axis] && board.table.has(axis) ? axis : 'step';
  const range = (query.get('range') || '').split('~').map(Number);
  board.range = range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
  const smoothing = Number(query.get('smooth'));
  board.smoothing = smoothing > 0 && smoothing < 1 ? smoothing : 0;
  board.look();
  const at = query.get('at');
  if (at !== null && Number.isFinite(Number(at)) && board.table.length) Object.assign(board, { cursor: board.snap(Number(at)), pinned: true });
}

function keepBoard({ range, axis, smoothing, pinned, cursor }) {
  const short = (value) => Number(value.toPrecision(8));
  keep({ x: axis === 'step' ? '' : axis, range: range ? range.map(short).join('~') : '', smooth: smoothing || '', at: pinned && cursor !== null ? short(cursor) : '' });
}

function refused(error) {
  const isMissing = error.status === 404;
  return make(
    'section', { class: 'card refused', 'data-test': 'refused' }, make('h1', { text: isMissing ? 'This run is not here' : 'This cannot be shown' }),
    make('p', { text: error.message }), isMissing ? make('p', { class: 'help', text: 'If it is about to begin, it appears here as soon as it does.' }) : null, link('/', { text: 'All runs' }),
  );
}
