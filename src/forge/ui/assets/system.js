// What the processes of a run use over time, which versions replicas serve, and what waits in queues.

class SystemView {
  constructor(run, place) {
    Object.assign(this, { run, table: null, tableId: null, isClosed: false });
    this.node = make('div', {});
    this.keys = { '/': () => this.filter?.focus(), Escape: () => { this.board?.point(null, true); this.board?.show({ range: null }); } };
    this.begin(place.query);
  }

  close() {
    this.isClosed = true;
  }

  get parameters() {
    return { run: this.run.id, of: 'system', points: POINTS };
  }

  async begin(query) {
    const found = await ask('metrics', this.parameters).catch((error) => error);
    if (this.isClosed) return;
    if (found instanceof Error) {
      this.node.replaceChildren(make('p', { class: 'card help', text: found.message }));
      return;
    }
    this.table = new Table(found);
    this.tableId = found.table;
    this.board = new Board(this.table, { lazy: true });
    recallBoard(this.board, query);
    this.filter = make('input', { type: 'search', class: 'filter', placeholder: 'Filter charts ( / )', 'aria-label': 'Filter charts' });
    this.filter.addEventListener('input', () => filterCharts(this.sections, this.filter.value));
    this.sections = make('div', { class: 'sections manyseries', 'data-test': 'system' });
    this.node.replaceChildren(toolBar(this.board, { more: [this.filter] }), this.sections);
    this.board.listeners.push((board, change) => this.changed(change));
    if (this.board.range) this.loadDetail();
    this.render();
  }

  changed(change) {
    if ('range' in change) this.loadDetail();
    if ('pin' in change && change.pin === undefined && !this.wasPinned) return; // the pointer moves
    this.wasPinned = this.board.pinned;
    keepBoard(this.board);
  }

  async loadDetail() {
    const { range } = this.board;
    const detail = await detailOf(this.table, this.board, this.parameters);
    if (!detail || this.board.range !== range) return;
    this.board.detail = detail;
    this.board.draw();
  }

  render() {
    const plans = this.run.description.systemCharts;
    const text = JSON.stringify(plans);
    if (text === this.planText) return;
    this.planText = text;
    this.board.charts = [];
    this.sections.replaceChildren(...chartSections(plans, this.board));
    if (!plans.length) this.sections.replaceChildren(make('p', { class: 'card help', text: 'Nothing is recorded of its processes: system.jsonl is written after steps, unless record.system_interval_s is null.' }));
    filterCharts(this.sections, this.filter.value);
  }

  refresh() {
    if (this.board) this.render();
  }

  // Loads the rows that are new, and again what has come meanwhile.
  async hear({ system }) {
    this.told = system;
    if (!this.table || this.loading) return;
    this.loading = true;
    while (this.told && !this.isClosed) {
      const told = this.told;
      this.told = null;
      await this.loadRows(told);
    }
    this.loading = false;
  }

  async loadRows(system) {
    const { steps } = this.table;
    const last = steps.length ? steps[steps.length - 1] : 0;
    const isOther = system.table !== this.tableId || this.table.length > 2.5 * POINTS;
    if (!isOther && system.lastStep === last) return;
    const found = await ask('metrics', isOther ? this.parameters : { ...this.parameters, first: last }).catch(() => null);
    if (!found || this.isClosed) return;
    if (isOther || found.table !== this.tableId) {
      if (!isOther) return; // its next step asks for all
      this.table.take(found);
      this.tableId = found.table;
    } else if (found.steps.length) this.table.append(found);
    this.board.draw();
    if (Object.keys(this.table.columns).length !== this.numColumns) {
      this.numColumns = Object.keys(this.table.columns).length;
      this.run.refresh();
    }
  }
}

VIEWS.system = {
  at: 30, label: 'System', make: (run, place) => new SystemView(run, place), isThere: ({ status }) => status.system.numRows > 0,
};
