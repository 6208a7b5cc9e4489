// The samples: a list to sort, filter and page through, and the one that is chosen beside it.

const ROWS = 12;

const ORDERS = {
  time: { label: 'in order', value: null },
  best: { label: 'highest reward', value: (item) => -(item.reward ?? -Infinity) },
  worst: { label: 'lowest reward', value: (item) => item.reward ?? Infinity },
  advantage: { label: 'largest advantage', value: (item) => -Math.abs(item.advantage ?? 0) },
  gap: { label: 'largest difference', value: (item) => -Math.abs(differences(item)?.largest ?? 0) },
  long: { label: 'longest', value: (item) => -item.numTokens },
  ...(data.samples.items.some(isEpisode) ? { turns: { label: 'most turns', value: (item) => -(item.numTurns ?? 1) } } : {}),
};

const KINDS = {
  all: { label: 'all', test: () => true },
  trained: { label: 'learned from', test: (item) => item.outcome === 'trained' },
  fruitless: { label: 'taught nothing', test: (item) => item.outcome !== 'trained' && item.outcome !== 'evaluation' },
  evaluation: { label: 'held-out evaluation', test: (item) => item.outcome === 'evaluation' },
  cut: { label: 'cut off by length', test: (item) => item.finish === 'length' },
  failed: { label: 'a reward failed', test: (item) => Object.keys(item.failures).length > 0 },
  mixed: { label: 'several versions', test: (item) => new Set(item.versions.map(([version]) => version)).size > 1 },
  ...(data.samples.items.some(isEpisode) ? {
    limit: { label: 'ended by a limit or truncated', test: (item) => isEpisode(item) && item.ending !== 'finished' },
    tools: { label: 'a tool call failed', test: (item) => isEpisode(item) && item.stats.num_tool_errors > 0 },
    broken: { label: 'a prefix break', test: (item) => isEpisode(item) && item.turns.some((turn) => turn.break !== null) },
    forked: { label: 'several branches', test: (item) => isEpisode(item) && new Set(item.turns.map(({ path }) => path.join('.'))).size > 1 },
    lost: { label: 'an answer undelivered', test: (item) => isEpisode(item) && item.turns.some((turn) => !turn.delivered) },
  } : {}),
};

class Samples {
  constructor() {
    this.items = data.samples.items;
    const pool = { ...data.samples, maskTruncated: data.run.maskTruncated };
    this.items.forEach((item) => { item.pool = pool; });
    this.steps = [...new Set(this.items.map(({ step }) => step))];
    this.state = { step: null, order: 'time', kind: 'all', low: null, high: null, query: '' };
    this.tokens = new TokenView();
    this.list = make('tbody', {});
    this.detail = make('article', { class: 'card detail', 'aria-live': 'polite' });
    this.position = make('output', { class: 'position', 'data-test': 'position' });
    this.pages = make('output', { class: 'position' });
    const head = ['Step', 'Completion', 'Reward', 'Adv.', 'Tokens'].map((text, at) => make('th', { scope: 'col', class: `col${at}`, text }));
    this.node = make(
      'div', { class: 'samples' },
      this.controls(),
      make(
        'div', { class: 'browser' },
        make(
          'div', { class: 'card list' },
          make('table', {}, make('thead', {}, make('tr', {}, ...head)), this.list),
          make('div', { class: 'pager' }, this.button('‹ page', () => this.turn(-1)), this.pages, this.button('page ›', () => this.turn(1))),
        ),
        this.detail,
      ),
    );
    document.addEventListener('keydown', (event) => this.key(event));
    this.apply({});
  }

  button(text, action, label) {
    return make('button', { type: 'button', text, 'aria-label': label, on: { click: action } });
  }

  // ---- What is shown ---------------------------------------------------------------------------------------------

  controls() {
    const { state } = this;
    this.slider = make('input', { type: 'range', min: 0, max: this.steps.length, value: 0, step: 1, 'aria-label': 'Step' });
    this.stepName = make('output', { class: 'stepname', text: 'all steps' });
    this.slider.addEventListener('input', () => this.apply({ step: this.steps[Number(this.slider.value) - 1] ?? null }));
    const number = (name, label) => {
      const field = make('input', { type: 'number', step: 'any', placeholder: label, 'aria-label': `Reward ${label}` });
      field.addEventListener('input', () => this.apply({ [name]: field.value === '' ? null : Number(field.value) }));
      return field;
    };
    this.search = make('input', { type: 'search', placeholder: 'Search prompts and completions  ( / )', 'aria-label': 'Search' });
    this.search.addEventListener('input', () => this.apply({ query: this.search.value }));
    const choice = (name, choices, label) => {
      const field = make('select', { 'aria-label': label });
      Object.entries(choices).forEach(([key, { label: text }]) => field.append(make('option', { value: key, text, selected: key === state[name] })));
      field.addEventListener('change', () => this.apply({ [name]: field.value }));
      return field;
    };
    return make(
      'div', { class: 'card controls' },
      make('label', { class: 'wide' }, make('span', { text: 'Step' }), this.slider, this.stepName),
      make('label', {}, make('span', { text: 'Sort' }), choice('order', ORDERS, 'Sort')),
      make('label', {}, make('span', { text: 'Show' }), choice('kind', KINDS, 'Show')),
      make('label', {}, make('span', { text: 'Reward' }), number('low', 'from'), number('high', 'to')),
      make('label', { class: 'wide' }, this.search),
    );
  }

  apply(change) {
    Object.assign(this.state, change);
    const { step, order, kind, low, high } = this.state;
    const query = this.state.query.toLowerCase();
    const within = ({ reward }) => (low === null || (reward !== null && reward >= low)) && (high === null || (reward !== null && reward <= high));
    this.found = this.items.filter((item) =>
      (step === null || item.step === step) && within(item) && KINDS[kind].test(item) && (query === '' || this.haystack(item).includes(query)));
    const { value } = ORDERS[order];
    if (value) this.found.sort((one, other) => value(one) - value(other));
    this.slider.value = step === null ? 0 : this.steps.indexOf(step) + 1;
    this.stepName.textContent = step === null ? 'all steps' : `step ${step}`;
    this.choose(this.found[0] || null);
  }

  haystack(item) {
    if (item.haystack === undefined) {
      const turns = isEpisode(item) ? conversationText(item) : '';
      item.haystack = `${item.promptId}\n${promptText(item)}\n${completionText(item)}\n${turns}`.toLowerCase();
    }
    return item.haystack;
  }

  // Shows the samples of the step nearest to the one asked for.
  goTo(step) {
    const nearest = this.steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best));
    this.apply({ step: nearest });
  }

  choose(item) {
    this.chosen = item;
    this.renderList();
    this.renderDetail();
  }

  move(by) {
    const at = this.found.indexOf(this.chosen) + by;
    if (at >= 0 && at < this.found.length) this.choose(this.found[at]);
  }

  turn(by) {
    const page = Math.floor(this.found.indexOf(this.chosen) / ROWS) + by;
    if (page >= 0 && page * ROWS < this.found.length) this.choose(this.found[page * ROWS]);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const actions = {
      ArrowRight: () => this.move(1), j: () => this.move(1), n: () => this.move(1),
      ArrowLeft: () => this.move(-1), k: () => this.move(-1), p: () => this.move(-1),
      '/': () => this.search.focus(),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // ---- The list --------------------------------------------------------------------------------------------------

  renderList() {
    const at = this.found.indexOf(this.chosen);
    const page = Math.max(0, Math.floor(at / ROWS));
    const rows = this.found.slice(page * ROWS, (page + 1) * ROWS).map((item) => this.row(item));
    if (!rows.length) rows.push(make('tr', {}, make('td', { class: 'none', colspan: 5, text: 'No sample is like that.' })));
    this.list.replaceChildren(...rows);
    this.pages.textContent = `page ${page + 1} of ${Math.max(1, Math.ceil(this.found.length / ROWS))}`;
    this.position.textContent = this.found.length ? `${at + 1} of ${this.found.length}` : 'none';
  }

  row(item) {
    const snippet = completionText(item).slice(0, 160).replace(/\s+/g, ' ').trim();
    const failed = Object.keys(item.failures).length > 0;
    const row = make(
      'tr', { class: item === this.chosen ? 'chosen' : '', 'aria-selected': String(item === this.chosen) },
      make('td', { class: 'col0', text: item.step }),
      make('td', { class: 'col1' }, make('span', { class: 'snippet', text: `${isEpisode(item) ? `${item.numTurns} × ` : ''}${snippet || '(nothing)'}` })),
      make('td', { class: 'col2' }, this.meter(item), failed ? make('span', { class: 'warn', title: 'a reward failed', text: ' !' }) : null),
      make('td', { class: 'col3', text: signed(item.advantage, 2) }),
      make('td', { class: 'col4', text: item.numTokens }),
    );
    row.addEventListener('click', () => this.choose(item));
    return row;
  }

  meter(item) {
    if (this.rewards === undefined) {
      const known = this.items.map(({ reward }) => reward).filter((reward) => reward !== null);
      this.rewards = known.reduce(([low, high], reward) => [Math.min(low, reward), Math.max(high, reward)], [0, 0]);
    }
    return rewardMeter(item.reward, this.rewards);
  }

  // ---- The chosen one --------------------------------------------------------------------------------------------

  renderDetail() {
    const item = this.chosen;
    if (!item) {
      this.detail.replaceChildren(make('p', { class: 'help', text: 'Change the filters above to see a sample.' }));
      return;
    }
    const completion = make('div', { class: 'completion' });
    this.detail.replaceChildren(
      make(
        'header', {},
        make('h3', {}, `Step ${item.step} · group ${item.group} · sample ${item.index}`),
        make('div', { class: 'moves' }, this.button('← previous', () => this.move(-1), 'Previous sample'), this.position, this.button('next →', () => this.move(1), 'Next sample')),
      ),
      sampleFacts(item),
      this.siblings(item) || '',
      ...questionNodes(item),
      make('h4', { text: isEpisode(item) ? 'Conversation' : 'Completion' }),
      completion,
      ...earningNodes(item),
    );
    this.tokens.show(item, completion);
  }

  siblings(item) {
    const group = this.items.filter(({ step, group: number, outcome }) => step === item.step && number === item.group && outcome === item.outcome);
    if (group.length < 2) return null;
    const strip = make('div', { class: 'siblings', role: 'group', 'aria-label': 'Samples of this group' }, make('span', { class: 'help', text: 'This group:' }));
    group.forEach((other) => {
      const button = this.button('', () => this.reach(other), `Sample ${other.index}, reward ${figure(other.reward)}`);
      button.append(this.meter(other));
      if (other === item) button.setAttribute('aria-current', 'true');
      strip.append(button);
    });
    return strip;
  }

  // Shows a sample even where the filters leave it out, by letting go of them.
  reach(item) {
    if (!this.found.includes(item)) {
      this.search.value = '';
      this.node.querySelectorAll('input[type=number]').forEach((field) => { field.value = ''; });
      this.node.querySelector('select[aria-label=Show]').value = 'all';
      this.apply({ kind: 'all', low: null, high: null, query: '', step: this.state.step === null ? null : item.step });
    }
    this.choose(item);
  }
}
