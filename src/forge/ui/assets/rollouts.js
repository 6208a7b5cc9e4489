// The rollouts of a run: what is looked for, a list of what was found, and the one that is chosen beside it.

const ROLLOUT_ROWS = 50;
const SHOWN_TOKENS = 8192;
const MOST_TOKENS = 131072;
const KEPT_SAMPLES = 24;

// The sample that an address names; nothing for what is no name of one.
function sampleOf(query) {
  const name = query.get('sample') || '';
  return /^[a-z]+(\.\d{1,18}){3}$/.test(name) ? name : '';
}

function sampleLink(run, query) {
  return placeOf(run, { view: 'rollouts', ...query });
}

class RolloutsView {
  constructor(run, place) {
    Object.assign(this, { run, found: null, chosen: null, samples: new Map(), asked: 0, isAsking: false, isStale: false, offset: 0, version: null });
    this.wanted = sampleOf(place.query);
    this.isAbreast = place.query.get('side') === '1';
    this.filters = new RolloutFilters(readFilters(place.query), () => this.search());
    this.count = make('p', { class: 'help', role: 'status', 'data-test': 'count' });
    this.body = make('tbody', {});
    const head = ['Step', 'Completion', 'Reward', 'Adv.', 'Tokens'].map((text, at) => make('th', { scope: 'col', class: `col${at}`, text }));
    this.box = make('div', { class: 'rolloutrows' }, make('table', {}, make('thead', {}, make('tr', {}, ...head)), this.body));
    this.pages = make('output', { class: 'position', 'data-test': 'pages' });
    this.pager = make('div', { class: 'pager' }, this.button('‹ page', () => this.turn(-1)), this.pages, this.button('page ›', () => this.turn(1)));
    this.detail = new RolloutDetail(this);
    this.node = make('div', { class: 'samples rollouts' }, this.filters.node, make('div', { class: 'foundbar' }, this.count, this.filters.active), make('div', { class: 'browser' }, make('div', { class: 'card list' }, this.box, this.pager), this.detail.node));
    this.keys = {
      '/': () => this.filters.search.focus(), c: () => this.detail.toggleAbreast(),
      ArrowRight: () => this.move(1), j: () => this.move(1), n: () => this.move(1), ArrowLeft: () => this.move(-1), k: () => this.move(-1), p: () => this.move(-1),
    };
    this.load({ at: this.wanted });
  }

  button(text, action, label) {
    return make('button', { type: 'button', text, 'aria-label': label, on: { click: action } });
  }

  close() {
    this.isClosed = true;
    this.detail.close();
  }

  // Another address of the same view.
  turnTo(place) {
    const values = readFilters(place.query);
    const sample = sampleOf(place.query);
    const isSame = ROLLOUT_PARAMETERS.every((name) => values[name] === this.filters.values[name]);
    if (isSame && sample === (this.chosen || '')) return;
    this.filters.take(values);
    this.wanted = sample;
    this.offset = 0;
    this.isFresh = true;
    this.load({ at: sample });
  }

  // The index of the server has grown.
  hear(status) {
    if (!status.rollouts || status.rollouts.version === this.version) return;
    this.version = status.rollouts.version;
    this.load({ isQuiet: true });
  }

  // The filters are others: the first of what is found is shown, unless the chosen one is among it.
  search() {
    this.offset = 0;
    this.box.scrollTop = 0;
    this.isFresh = true;
    this.load();
  }

  // ---- Asking ----------------------------------------------------------------------------------------------------

  // Asks for the list. A later question makes the answers to earlier ones void; a quiet one waits for its turn.
  async load({ at = null, isQuiet = false } = {}) {
    if (isQuiet && this.isAsking) {
      this.isStale = true;
      return;
    }
    const number = (this.asked += 1);
    const { sort, ...values } = this.filters.values;
    const given = Object.fromEntries(Object.entries(values).filter(([, value]) => value !== ''));
    const follow = this.offset > 0 && isQuiet ? this.chosen : null;
    this.isAsking = true;
    let found;
    try {
      found = await ask('rollouts', { run: this.run, ...given, sort: sort || null, offset: this.offset, limit: ROLLOUT_ROWS, at: at || follow || null });
    } catch (error) {
      if (number !== this.asked || this.isClosed) return;
      Object.assign(this, { isAsking: false, version: null }); // so that the next news of the server asks again
      this.count.textContent = error instanceof Refusal ? error.message : '';
      return;
    }
    if (number !== this.asked || this.isClosed) return;
    this.isAsking = false;
    this.take(found);
    if (found.searched < 1) this.load({ at });
    else if (this.isStale) {
      this.isStale = false;
      this.load({ isQuiet: true });
    }
  }

  take(found) {
    this.found = found;
    this.version = found.version;
    this.offset = found.offset;
    this.filters.hear(found);
    this.renderCount();
    const isElsewhere = this.isFresh && found.rows.length > 0 && !found.rows.some(({ name }) => name === this.chosen);
    if (isElsewhere || found.searched >= 1) this.isFresh = false;
    if (this.wanted) {
      this.choose(this.wanted, { isNew: false });
      this.wanted = '';
    } else if ((!this.chosen || isElsewhere) && found.rows.length) this.choose(found.rows[0].name, { isNew: false });
    else if (!this.chosen && !found.rows.length) this.detail.empty(found);
    this.renderList();
  }

  // Shows a page of the list.
  turn(by) {
    const next = this.offset + by * ROLLOUT_ROWS;
    if (!this.found || next < 0 || next >= this.found.numFound) return null;
    this.offset = next;
    this.box.scrollTop = 0;
    return this.load();
  }

  // ---- The list --------------------------------------------------------------------------------------------------

  renderCount() {
    const { numFound, numRows, searched, progress, isCut, numUnreadable } = this.found;
    const whole = (number) => number.toLocaleString('en-US');
    const told = [numFound === numRows && searched >= 1 ? `${whole(numRows)} rollouts` : `${whole(numFound)} of ${whole(numRows)} rollouts`];
    if (searched < 1) told.push(`searching, ${Math.floor(100 * searched)}%`);
    if (progress < 1) told.push(`reading the run’s files, newest steps first, ${Math.floor(100 * progress)}%`);
    if (isCut) told.push('older ones are left out, see the guide');
    if (numUnreadable) told.push(`${whole(numUnreadable)} lines could not be read`);
    this.count.textContent = told.join(' · ');
  }

  renderList() {
    const { rows, numFound, offset } = this.found;
    this.rewards = rows.map(({ reward }) => reward).filter((reward) => reward !== null).reduce(([low, high], reward) => [Math.min(low, reward), Math.max(high, reward)], [0, this.found.histograms.reward?.high ?? 0]);
    const shown = rows.map((row) => this.row(row));
    if (!shown.length) shown.push(make('tr', {}, make('td', { class: 'none', colspan: 5, text: this.emptyText() })));
    this.body.replaceChildren(...shown);
    const page = Math.floor(offset / ROLLOUT_ROWS) + 1;
    this.pages.textContent = `page ${page.toLocaleString('en-US')} of ${Math.max(1, Math.ceil(numFound / ROLLOUT_ROWS)).toLocaleString('en-US')}`;
    this.pager.hidden = numFound <= ROLLOUT_ROWS;
    this.detail.renderPosition();
  }

  emptyText() {
    const { numRows, searched, progress } = this.found;
    if (searched < 1) return 'Nothing found yet.';
    if (numRows) return 'No rollout is like that.';
    return progress < 1 ? 'Reading the run’s files …' : 'This run has no rollouts yet. They appear here as they are written (record.rollouts).';
  }

  row(row) {
    const tags = [row.outcome === 'trained' ? '' : row.outcome === 'evaluation' ? 'held out' : row.outcome.replace('_', ' '), row.turns > 1 ? `${row.turns} turns` : '', row.flags.includes('cut') || row.flags.includes('limit') ? 'cut off' : ''].filter((word) => word);
    const isChosen = row.name === this.chosen;
    const node = make(
      'tr', { class: isChosen ? 'chosen' : '', 'aria-selected': String(isChosen), 'data-sample': row.name },
      make('td', { class: 'col0', text: row.step.toLocaleString('en-US') }),
      make('td', { class: 'col1' }, make('span', { class: 'snippet' }, ...tags.map((text) => make('span', { class: 'tag', text })), row.text || '(nothing)')),
      make('td', { class: 'col2' }, rewardMeter(row.reward, this.rewards), row.flags.includes('failed') ? make('span', { class: 'warn', title: 'a reward failed', text: ' !' }) : null),
      make('td', { class: 'col3', text: row.kind === 'step' ? signed(row.advantage, 2) : '–' }),
      make('td', { class: 'col4', text: row.tokens.toLocaleString('en-US') }),
    );
    node.addEventListener('click', () => this.choose(row.name));
    return node;
  }

  get place() {
    const at = this.found ? this.found.rows.findIndex(({ name }) => name === this.chosen) : -1;
    return at < 0 ? null : this.offset + at;
  }

  // ---- The chosen one --------------------------------------------------------------------------------------------

  choose(name, { isNew = true } = {}) {
    this.chosen = name;
    keep({ sample: name });
    this.body.querySelectorAll('tr').forEach((row) => {
      row.classList.toggle('chosen', row.dataset.sample === name);
      row.setAttribute('aria-selected', String(row.dataset.sample === name));
    });
    this.detail.show(name);
    if (isNew) this.body.querySelector('tr.chosen')?.scrollIntoView({ block: 'nearest' });
  }

  async move(by) {
    if (!this.found?.rows.length) return;
    const at = this.place === null ? (by > 0 ? -1 : this.found.rows.length) : this.place - this.offset;
    let next = this.found.rows[at + by];
    if (!next) {
      await this.turn(by);
      next = by > 0 ? this.found.rows[0] : this.found.rows[this.found.rows.length - 1];
      if (at + by >= 0 && at + by < ROLLOUT_ROWS) return;
    }
    if (next && next.name !== this.chosen) this.choose(next.name);
  }

  // A sample as the server describes it. The last ones are kept, for going back and forth.
  async sample(name, tokens) {
    const key = `${name} ${tokens}`;
    if (!this.samples.has(key)) {
      this.samples.set(key, await ask('rollouts/sample', { run: this.run, name, tokens }));
      if (this.samples.size > KEPT_SAMPLES) this.samples.delete(this.samples.keys().next().value);
    }
    return this.samples.get(key);
  }
}
