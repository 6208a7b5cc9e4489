// Which rollouts are shown: fields, choices and histograms. The address has all of it.

const ROLLOUT_SORTS = {
  newest: 'newest step first', oldest: 'oldest step first', best: 'highest reward', worst: 'lowest reward', advantage: 'largest advantage',
  gap: 'largest trainer − sampler', long: 'longest', short: 'shortest', turns: 'most turns',
};

const ROLLOUT_OUTCOMES = { '': 'all', trained: 'learned from', fruitless: 'taught nothing', evaluation: 'held-out evaluation' };

const ROLLOUT_FLAGS = {
  cut: 'cut off by length', failed: 'a reward failed', mixed: 'several versions', limit: 'ended by a limit or truncated', tools: 'a tool call failed',
  broken: 'a prefix break', forked: 'several branches', lost: 'an answer undelivered',
};

const ROLLOUT_RANGES = {
  step: 'Step', reward: 'Reward', tokens: 'Length', advantage: 'Advantage', version: 'Weights version', turns: 'Turns', gap: 'Largest trainer − sampler',
};
const PLOTTED_RANGES = ['step', 'reward', 'tokens'];
const ROLLOUT_PARAMETERS = ['q', 'outcome', 'flags', 'ending', 'tool', 'prompt', 'sort', ...Object.keys(ROLLOUT_RANGES)];
const TYPING_MS = 250;

// The filters of an address: words as they are, ranges as `low~high`.
function readFilters(query) {
  return Object.fromEntries(ROLLOUT_PARAMETERS.map((name) => [name, query.get(name) || '']));
}

function readRange(text) {
  const [low, high] = text.includes('~') ? text.split('~') : [text, text];
  return [low, high].map((word) => (word === '' || !Number.isFinite(Number(word)) ? null : Number(word)));
}

function writeRange([low, high]) {
  if (low === null && high === null) return '';
  return low === high ? String(low) : `${low ?? ''}~${high ?? ''}`;
}

function rangeText(text) {
  const [low, high] = readRange(text);
  if (low !== null && low === high) return figure(low);
  if (low === null) return `at most ${figure(high)}`;
  return high === null ? `at least ${figure(low)}` : `${figure(low)} to ${figure(high)}`;
}

// Bars of how many rollouts there are from one end to the other. Dragging over them chooses a range.
class Histogram {
  constructor(label, onRange) {
    Object.assign(this, { label, onRange, found: null, range: [null, null], from: null });
    this.svg = draw('svg', { class: 'histogram', viewBox: '0 0 100 32', preserveAspectRatio: 'none', role: 'img', 'aria-label': `${label}: how many rollouts. Drag to choose a range; the fields do the same.` });
    this.node = make('div', { class: 'spread' }, this.svg);
    this.svg.addEventListener('pointerdown', (event) => {
      if (event.button !== 0 || !this.found) return;
      this.from = this.at(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener('pointermove', (event) => { if (this.from !== null) this.mark([this.from, this.at(event)].sort((one, other) => one - other)); });
    this.svg.addEventListener('pointerup', (event) => {
      if (this.from === null) return;
      const [low, high] = [this.from, this.at(event)].sort((one, other) => one - other);
      this.from = null;
      this.onRange(this.edges(low, high));
    });
    this.svg.addEventListener('dblclick', () => this.onRange([null, null]));
  }

  at(event) {
    const box = this.svg.getBoundingClientRect();
    return Math.min(this.found.counts.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * this.found.counts.length)));
  }

  // The values between the outer edges of two bars, as short as they can be said.
  edges(first, last) {
    const { low, high, counts } = this.found;
    const width = (high - low) / counts.length;
    const isWhole = Number.isInteger(low + 0.5) && Number.isInteger(width);
    if (isWhole) return [low + 0.5 + first * width, low - 0.5 + (last + 1) * width];
    const digits = Math.max(0, 2 - Math.floor(Math.log10(width || 1)));
    const short = (value) => Number(value.toFixed(Math.min(12, digits)));
    return [short(low + first * width), short(low + (last + 1) * width)];
  }

  show(found, range) {
    if (this.from !== null) return; // a range is being chosen
    Object.assign(this, { found, range });
    if (!found) {
      this.svg.replaceChildren();
      return;
    }
    const { counts } = found;
    const most = counts.reduce((high, count) => Math.max(high, count), 1);
    const width = 100 / counts.length;
    this.selection = draw('rect', { class: 'chosen', y: 0, height: 32 });
    const bars = counts.map((count, place) => (count ? draw(
      'rect', { class: 'bar', x: (place + 0.06) * width, width: width * 0.88, y: 32 - Math.max(1, (31 * count) / most), height: 32 },
      draw('title', { text: `${this.edges(place, place).map((edge) => figure(edge)).join(' to ')}: ${count.toLocaleString('en-US')}` }),
    ) : null)).filter((bar) => bar);
    this.svg.replaceChildren(this.selection, ...bars);
    this.markRange();
  }

  // Shows which bars the range has.
  markRange() {
    const [low, high] = this.range;
    const { low: from, high: to, counts } = this.found;
    if (low === null && high === null) {
      this.mark(null);
      return;
    }
    const place = (value) => Math.min(counts.length - 1, Math.max(0, Math.floor(((value - from) / (to - from || 1)) * counts.length)));
    this.mark([low === null ? 0 : place(low), high === null ? counts.length - 1 : place(high - (to - from) * 1e-9)]);
  }

  mark(bars) {
    const width = 100 / this.found.counts.length;
    this.selection.setAttribute('x', bars ? bars[0] * width : 0);
    this.selection.setAttribute('width', bars ? (bars[1] - bars[0] + 1) * width : 0);
  }
}

class RolloutFilters {
  // `onChange()` hears that `values` are others now.
  constructor(values, onChange) {
    Object.assign(this, { values, onChange, found: null, plots: {}, fields: {}, flagChips: {}, shownChips: '' });
    this.search = make('input', { type: 'search', value: values.q, placeholder: 'Search prompts, completions, messages, tool calls  ( / )', 'aria-label': 'Search rollouts' });
    this.search.addEventListener('input', () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.change({ q: this.search.value.trim() }), TYPING_MS);
    });
    this.outcome = this.choice('outcome', 'Show', ROLLOUT_OUTCOMES);
    this.sort = this.choice('sort', 'Sort', ROLLOUT_SORTS);
    this.ending = this.choice('ending', 'Ending', { '': 'any' });
    this.tool = this.choice('tool', 'Tool', { '': 'any' });
    this.flags = make('div', { class: 'flags', role: 'group', 'aria-label': 'Only rollouts with' });
    this.active = make('div', { class: 'chipbar active', role: 'group', 'aria-label': 'Filters that are set', 'data-test': 'active' });
    const plots = PLOTTED_RANGES.map((name) => this.plotted(name));
    const others = Object.keys(ROLLOUT_RANGES).filter((name) => !PLOTTED_RANGES.includes(name)).map((name) => make('label', {}, make('span', { text: ROLLOUT_RANGES[name] }), this.bounds(name)));
    this.spreads = make('details', { class: 'narrow' }, make('summary', { text: 'Steps, rewards, lengths' }), make('div', { class: 'spreads' }, ...plots));
    this.spreads.open = !matchMedia('(max-width: 900px)').matches || this.isSet(PLOTTED_RANGES);
    this.more = make('details', { class: 'narrow' }, make('summary', { text: 'More filters' }), make('div', { class: 'choices' }, this.ending.node, this.tool.node, ...others), this.flags);
    this.more.open = this.isSet(['flags', 'ending', 'tool', ...Object.keys(ROLLOUT_RANGES).filter((name) => !PLOTTED_RANGES.includes(name))]);
    this.node = make('div', { class: 'card rolloutbar' }, make('div', { class: 'controls' }, make('label', { class: 'wide' }, this.search), this.outcome.node, this.sort.node), this.spreads, this.more);
    this.render();
  }

  isSet(names) {
    return names.some((name) => this.values[name]);
  }

  choice(name, label, choices) {
    const field = make('select', { 'aria-label': label });
    field.addEventListener('change', () => this.change({ [name]: field.value }));
    const node = make('label', {}, make('span', { text: label }), field);
    const offer = (offered) => {
      const value = this.values[name];
      const all = value && !(value in offered) ? { ...offered, [value]: value } : offered;
      const key = JSON.stringify(all);
      if (field.dataset.offered !== key) {
        field.replaceChildren(...Object.entries(all).map(([key_, text]) => make('option', { value: key_, text })));
        field.dataset.offered = key;
      }
      field.value = value || Object.keys(all)[0];
    };
    offer(choices);
    return { node, field, offer, choices };
  }

  bounds(name) {
    const pair = ['from', 'to'].map((word, place) => {
      const field = make('input', { type: 'number', step: 'any', placeholder: word, 'aria-label': `${ROLLOUT_RANGES[name]} ${word}` });
      field.addEventListener('change', () => {
        const range = readRange(this.values[name]);
        range[place] = field.value === '' ? null : Number(field.value);
        this.change({ [name]: writeRange(range) });
      });
      return field;
    });
    this.fields[name] = pair;
    return make('span', { class: 'bounds' }, ...pair);
  }

  plotted(name) {
    this.plots[name] = new Histogram(ROLLOUT_RANGES[name], (range) => this.change({ [name]: writeRange(range) }));
    return make('div', { class: 'plotted' }, make('div', { class: 'plothead' }, make('span', { text: ROLLOUT_RANGES[name] }), this.bounds(name)), this.plots[name].node);
  }

  change(change) {
    Object.assign(this.values, change);
    keep(Object.fromEntries(Object.entries(this.values).map(([name, value]) => [name, name === 'sort' && value === 'newest' ? '' : value])));
    this.render();
    this.onChange();
  }

  clear() {
    clearTimeout(this.typing);
    this.search.value = '';
    this.change(Object.fromEntries(ROLLOUT_PARAMETERS.filter((name) => name !== 'sort').map((name) => [name, ''])));
  }

  // Takes other values, those of an address.
  take(values) {
    this.values = values;
    if (document.activeElement !== this.search) this.search.value = values.q;
    this.render();
  }

  // What there is, as the server found it.
  hear(found) {
    this.found = found;
    this.render();
  }

  get chips() {
    const { values } = this;
    const ranges = Object.keys(ROLLOUT_RANGES).filter((name) => values[name]).map((name) => [name, `${ROLLOUT_RANGES[name]}: ${rangeText(values[name])}`]);
    const flags = values.flags.split(',').filter((flag) => flag).map((flag) => ['flags', ROLLOUT_FLAGS[flag] || flag, values.flags.split(',').filter((other) => other !== flag).join(',')]);
    const words = [['q', `“${values.q}”`], ['outcome', ROLLOUT_OUTCOMES[values.outcome] || values.outcome], ['ending', `ending: ${values.ending}`], ['tool', `tool: ${values.tool}`], ['prompt', `prompt: ${values.prompt}`]];
    return [...words.filter(([name]) => values[name]), ...ranges, ...flags];
  }

  render() {
    const { values, found } = this;
    for (const [name, pair] of Object.entries(this.fields)) {
      const range = readRange(values[name]);
      pair.forEach((field, place) => { if (document.activeElement !== field) field.value = range[place] ?? ''; });
    }
    const named = (words, known) => Object.fromEntries(words.map((word) => [word, known[word] || word]));
    this.outcome.offer({ ...ROLLOUT_OUTCOMES, ...Object.fromEntries(Object.keys(found?.outcomes || {}).filter((word) => !(word in ROLLOUT_OUTCOMES)).map((word) => [word, `– ${word}`])) });
    this.sort.offer(ROLLOUT_SORTS);
    this.ending.offer({ '': 'any', ...named(Object.keys(found?.endings || {}), { ...ENDS, ...ENDINGS }) });
    this.tool.offer({ '': 'any', ...named(found?.tools || [], {}) });
    this.tool.node.hidden = !found?.tools.length && !values.tool;
    PLOTTED_RANGES.forEach((name) => this.plots[name].show(found?.histograms[name] || null, readRange(values[name])));
    this.renderFlags();
    this.renderChips();
  }

  // Chips are made again only when they are others, so that the focus stays where it is.
  renderChips() {
    const key = JSON.stringify(this.chips);
    if (key === this.shownChips) return;
    this.shownChips = key;
    const clear = make('button', { type: 'button', class: 'chip', text: 'clear all', on: { click: () => this.clear() } });
    const chips = this.chips.map(([name, text, rest]) => make(
      'button', { type: 'button', class: 'chip', 'aria-label': `Remove the filter ${text}`, on: { click: () => { if (name === 'q') this.search.value = ''; this.change({ [name]: rest || '' }); } } },
      make('span', { text }), make('span', { 'aria-hidden': 'true', text: '×' }),
    ));
    this.active.replaceChildren(...chips, ...(chips.length > 1 ? [clear] : []));
  }

  renderFlags() {
    const chosen = new Set(this.values.flags.split(',').filter((flag) => flag));
    for (const [flag, label] of Object.entries(ROLLOUT_FLAGS)) {
      this.flagChips[flag] ||= this.flagChip(flag, label);
      const [chip, count] = this.flagChips[flag];
      chip.setAttribute('aria-pressed', String(chosen.has(flag)));
      count.textContent = this.found ? (this.found.flags[flag] || 0).toLocaleString('en-US') : '';
      chip.hidden = !chosen.has(flag) && !this.found?.flags[flag];
    }
    this.flags.hidden = Object.values(this.flagChips).every(([chip]) => chip.hidden);
  }

  flagChip(flag, label) {
    const count = make('b', {});
    const chip = make('button', { type: 'button', class: 'chip', on: { click: () => {
      const chosen = this.values.flags.split(',').filter((other) => other);
      this.change({ flags: (chosen.includes(flag) ? chosen.filter((other) => other !== flag) : [...chosen, flag]).join(',') });
    } } }, make('span', { text: label }), count);
    this.flags.append(chip);
    return [chip, count];
  }
}
