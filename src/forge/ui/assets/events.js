// What happened to a run: changes while it ran, faults, crashes and restarts, workers that were restored.

function happened(description, table) {
  const found = [
    ...description.changes.map((change) => ({ time: Date.parse(change.time) / 1000, kind: 'changed', text: `${change.key}: ${JSON.stringify(change.before)} → ${JSON.stringify(change.after)}`, where: `after step ${change.step}`, by: change.by })),
    ...description.events.map((event) => supervisorEvent(event)),
    ...description.faults.map((fault) => faultEvent(fault)),
    ...recoveries(table),
  ];
  return found.sort((one, other) => (other.time || 0) - (one.time || 0));
}

function supervisorEvent(event) {
  const time = Date.parse(event.time) / 1000;
  const status = event.status < 0 ? `signal ${-event.status}` : `exit code ${event.status}`;
  const where = event.step === null || event.step === undefined ? '' : `after step ${event.step}`;
  if (event.event === 'crash') {
    const text = `crashed with ${status}; ${event.action === 'restart' ? 'started again' : 'not started again'}`;
    return { time, kind: 'crash', text, where, more: Array.isArray(event.tail) ? event.tail.join('\n') : '' };
  }
  if (event.event === 'damaged') return { time, kind: 'crash', text: `a damaged checkpoint was set aside: ${event.checkpoint}`, where };
  return { time, kind: 'end', text: event.event === 'end' ? `ended with ${status}` : String(event.event), where };
}

function faultEvent({ time, step, kind, where, process, message, traceback, num_like: numLike }) {
  const words = [where, process && process !== 'controller' ? `noticed by ${process}` : ''];
  return {
    time: Date.parse(time) / 1000, kind: 'fault', label: String(kind), text: String(message), more: typeof traceback === 'string' ? traceback : '', summary: 'traceback',
    where: [...words, Number.isFinite(step) ? `after step ${step}` : ''].filter((word) => word).join(' · '), count: Number.isFinite(numLike) && numLike > 1 ? numLike : 1,
  };
}

function recoveries(table) {
  const restarts = table.columns['recovery/restarts'] || [];
  return restarts.flatMap((count, row) => {
    if (!count) return [];
    const again = (table.columns['recovery/steps_retrained'] || [])[row];
    const seconds = (table.columns['recovery/seconds'] || [])[row];
    const told = [`${figure(count)} ${count === 1 ? 'worker' : 'workers'} restored`, again ? `${figure(again)} steps trained again` : '', seconds ? span(seconds) : ''];
    return [{ time: table.times[row], kind: 'recovery', text: told.filter((word) => word).join(', '), where: `before step ${table.steps[row]}` }];
  });
}

const HAPPENED = { changed: 'change', fault: 'fault', crash: 'crash', end: 'end', recovery: 'recovery' };
const MOST_EVENTS = 300;

class EventsView {
  constructor(run, place) {
    Object.assign(this, { run, kind: HAPPENED[place.query.get('kind')] ? place.query.get('kind') : '', query: '', open: new Set() });
    this.chips = make('div', { class: 'chipbar', role: 'group', 'aria-label': 'Kind' });
    this.filter = make('input', { type: 'search', placeholder: 'Search ( / )', 'aria-label': 'Search events' });
    this.filter.addEventListener('input', () => { this.query = this.filter.value.toLowerCase(); this.render(); });
    this.bar = make('div', { class: 'listbar' }, this.chips, this.filter);
    this.body = make('div', {});
    this.node = make('div', {}, this.bar, this.body);
    this.keys = { '/': () => this.filter.focus() };
    this.refresh();
  }

  refresh() {
    this.events = happened(this.run.description, this.run.table);
    this.bar.hidden = this.events.length < 2;
    this.renderChips();
    this.render();
  }

  renderChips() {
    const kinds = Object.keys(HAPPENED).filter((kind) => kind === this.kind || this.events.some((event) => event.kind === kind));
    const chip = (kind, label, count) => make('button', { type: 'button', class: 'chip', 'aria-pressed': String(this.kind === kind), on: { click: () => this.choose(kind) } }, `${label} `, make('b', { text: count.toLocaleString('en-US') }));
    const chips = [chip('', 'all', this.events.length), ...kinds.map((kind) => chip(kind, HAPPENED[kind], this.events.filter((event) => event.kind === kind).length))];
    const text = chips.map((each) => each.textContent + each.getAttribute('aria-pressed')).join();
    if (text === this.chipText) return; // a button that is replaced loses the focus
    this.chipText = text;
    this.chips.replaceChildren(...chips);
  }

  choose(kind) {
    this.kind = kind;
    keep({ kind });
    this.renderChips();
    this.render();
  }

  render() {
    const found = this.events.filter((event) => (!this.kind || event.kind === this.kind) && [event.text, event.where, event.more, event.label].join(' ').toLowerCase().includes(this.query));
    if (!found.length) {
      this.body.replaceChildren(make('p', { class: 'card help', 'data-test': 'events', text: this.events.length ? 'Nothing is like that.' : 'Nothing out of the ordinary: no change while it ran, no fault, no crash, no restart.' }));
      return;
    }
    const shown = found.slice(0, MOST_EVENTS);
    const note = found.length > shown.length ? make('p', { class: 'help', text: `The newest ${MOST_EVENTS} of ${found.length.toLocaleString('en-US')}.` }) : null;
    this.body.replaceChildren(...[make('ol', { class: 'card happened', 'data-test': 'events' }, ...shown.map((event) => this.item(event))), note].filter((node) => node));
  }

  item({ time, kind, label, text, where, by, more, summary, count }) {
    const key = `${time} ${text}`;
    const details = more ? make('details', { open: this.open.has(key) }, make('summary', { text: summary || 'last lines of its standard error' }), make('pre', { text: more, tabindex: 0 })) : null;
    details?.addEventListener('toggle', () => { if (details.open) this.open.add(key); else this.open.delete(key); });
    return make(
      'li', { class: kind },
      make('span', { class: 'sort', text: label || HAPPENED[kind] }),
      make('div', {}, make('b', { text: count > 1 ? `${text} (${count.toLocaleString('en-US')} times)` : text }), make('small', { text: [where, by ? `by ${by}` : '', time ? moment(time) : ''].filter((word) => word).join(' · ') }), details),
    );
  }
}
