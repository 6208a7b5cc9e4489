// What every process did when, and what it waited for: the trace of a run, while it grows.

const SHORTEST_S = 2e-5;
// Times far from the origin are not exact.
const ROUNDING_S = 1e-6;
const LAST_STEPS = 8;
const LOAD_MS = 70;

class TimelineView {
  constructor(run, place) {
    Object.assign(this, { run, found: null, isClosed: false, isFollowing: false, args: new Map(), number: 0, loadedTo: null });
    this.canvas = new TimelineCanvas(() => this.load());
    this.reading = make('span', { class: 'reading', role: 'status', 'data-test': 'window' });
    this.filter = make('input', { type: 'search', class: 'filter', placeholder: 'Find spans ( / )', 'aria-label': 'Find spans' });
    this.filter.addEventListener('input', () => { this.canvas.query = this.filter.value.toLowerCase(); this.canvas.refresh(); });
    const button = (text, label, act) => make('button', { type: 'button', text, title: label, 'aria-label': label, on: { click: act } });
    this.follow = make('button', { type: 'button', class: 'switch', 'aria-pressed': 'false', text: 'follow', title: 'Keep the newest part in view', on: { click: () => this.setFollowing(!this.isFollowing) } });
    this.save = make('a', { class: 'link', download: '', text: 'this part' });
    this.saveAll = make('a', { class: 'link', download: '', href: `/api/trace?${queryOf({ run: run.id })}`, text: 'whole trace' });
    this.legend = make('div', { class: 'legend', role: 'group', 'aria-label': 'Kinds of spans' });
    this.details = make('div', { class: 'spandetails', 'aria-live': 'polite', 'data-test': 'span' });
    this.totals = make('div', {});
    this.profiles = make('div', {});
    this.node = make(
      'div', {},
      make('nav', { class: 'bar', 'aria-label': 'Timeline' }, this.reading, this.filter, this.follow, button('−', 'Zoom out', () => this.zoom(2)), button('+', 'Zoom in', () => this.zoom(0.5)), button('whole run', 'Show the whole run', () => this.show(this.first, this.end))),
      make('div', { class: 'card timelinecard' }, this.legend, this.canvas.node, this.details),
      make('p', { class: 'help' }, 'Drag to zoom, Ctrl and the wheel too; the wheel sideways, ← → or Shift and drag to move; click a span for its arguments. Download ', this.save, ' or the ', this.saveAll, ' for ', make('a', { href: 'https://ui.perfetto.dev', target: '_blank', rel: 'noopener noreferrer', text: 'ui.perfetto.dev' }), '.'),
      this.totals, this.profiles,
    );
    this.keys = { '/': () => this.filter.focus() };
    this.renderLegend();
    this.refresh();
    this.listen();
    this.begin(place.query);
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.canvas.close();
  }

  get end() {
    return Math.max(this.found?.end || 0, SHORTEST_S);
  }

  // When the first span began: a process may be much older than its run.
  get first() {
    return this.found?.first || 0;
  }

  async begin(query) {
    const given = (query.get('t') || '').split('~').map(Number);
    const first = await this.ask(0, 1e-3).catch((error) => error);
    if (this.isClosed) return;
    if (first instanceof Error) {
      this.node.replaceChildren(make('p', { class: 'card help', text: first.message }));
      return;
    }
    this.found = first;
    const isGiven = given.length === 2 && given.every(Number.isFinite) && given[0] < given[1];
    const isLive = isAlive(this.run.description.status.summary);
    this.setFollowing(isLive && !isGiven);
    if (isGiven) this.show(...given);
    else this.show(this.newest(), this.end);
  }

  // Where the last few steps began.
  newest() {
    const { times, steps } = this.run.table;
    const { origin } = this.found;
    if (origin === null || steps.length <= LAST_STEPS) return this.first;
    return Math.max(this.first, Math.min(times[times.length - 1 - LAST_STEPS] - origin, this.end - SHORTEST_S));
  }

  setFollowing(isFollowing) {
    this.isFollowing = isFollowing;
    this.follow.setAttribute('aria-pressed', String(isFollowing));
    this.follow.hidden = !isAlive(this.run.description.status.summary);
    if (isFollowing && this.found) this.show(this.end - (this.canvas.window[1] - this.canvas.window[0]), this.end, true);
  }

  // ---- The part that is looked at --------------------------------------------------------------------------------

  show(start, end, keepsFollowing = false) {
    const most = Math.max(this.end, SHORTEST_S);
    const length = Math.min(Math.max(end - start, SHORTEST_S), most);
    const from = Math.min(Math.max(0, start), Math.max(0, most - length));
    this.canvas.window = [from, from + length];
    if (!keepsFollowing && from + length < this.end - 0.02 * length) this.setFollowing(false);
    const short = (value) => Number(value.toFixed(6));
    const place = from <= this.first + ROUNDING_S && from + length >= this.end - ROUNDING_S ? '' : `${short(from)}~${short(from + length)}`;
    this.canvas.canvas.dataset.window = place;
    keep({ t: this.isFollowing ? '' : place });
    this.canvas.refresh();
    this.tell();
    this.load();
  }

  zoom(factor, at = null) {
    const [start, end] = this.canvas.window;
    const centre = at ?? (start + end) / 2;
    this.show(centre - (centre - start) * factor, centre + (end - centre) * factor);
  }

  move(part) {
    const [start, end] = this.canvas.window;
    this.show(start + part * (end - start), end + part * (end - start));
  }

  tell() {
    const [start, end] = this.canvas.window;
    const reading = this.found.progress < 1 ? ` · reading the trace, ${Math.round(100 * this.found.progress)}%` : '';
    this.reading.textContent = `${clock(start, (end - start) / 100)} to ${clock(end, (end - start) / 100)}, ${lasting(end - start)}${this.shown?.isCoarse ? ' · overview: zoom in for single spans' : ''}${reading}`;
    this.save.setAttribute('href', `/api/trace?${queryOf({ run: this.run.id, start, end })}`);
    this.canvas.canvas.setAttribute('aria-label', `Timeline from ${clock(start, 0.1)} to ${clock(end, 0.1)}. What took how long is in the table below. Keys: arrows move, plus and minus zoom, comma and full stop choose a span, Escape shows the whole run.`);
  }

  ask(start, end) {
    const points = Math.round(Math.min(4000, Math.max(32, 2 * (this.canvas.plot || 600))));
    return ask('timeline', { run: this.run.id, start, end, points });
  }

  // Loads what is in view, with half as much again at both sides.
  load() {
    if (!this.found) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      const [start, end] = this.canvas.window;
      const room = (end - start) / 2;
      const number = this.number += 1;
      const found = await this.ask(Math.max(0, start - room), end + room).catch(() => null);
      if (!found || this.isClosed || number !== this.number) return;
      this.take(found);
    }, LOAD_MS);
  }

  take(found) {
    if (this.found.generation !== found.generation) this.args.clear();
    this.found = found;
    this.shown = found;
    this.canvas.take(found);
    this.tell();
    this.renderTotals();
    if (found.progress < 1) {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => { if (this.isFollowing) this.setFollowing(true); else this.load(); }, 150);
    }
  }

  // A step has ended, so the trace has grown.
  async hear() {
    this.hasGrown = true;
    if (!this.found || this.hearing) return;
    this.follow.hidden = !isAlive(this.run.description.status.summary);
    this.hearing = true;
    while (this.hasGrown && !this.isClosed) {
      this.hasGrown = false;
      await this.look();
    }
    this.hearing = false;
  }

  async look() {
    const last = this.end;
    const found = await this.ask(0, 1e-3).catch(() => null);
    if (!found || this.isClosed || found.end === last) return;
    this.found = { ...this.found, first: found.first, end: found.end, progress: found.progress, generation: found.generation };
    const [start, end] = this.canvas.window;
    if (this.isFollowing) this.show(this.newest(), this.end, true);
    else if (end + (end - start) / 2 > last) this.load();
  }

  refresh() {
    const { profiles } = this.run.description;
    if (!profiles.length) {
      this.profiles.replaceChildren();
      return;
    }
    const size = (bytes) => (bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);
    this.profiles.replaceChildren(make('section', { 'data-test': 'profiles' }, make('h2', { text: 'Profiles of steps' }), make('p', { class: 'help', text: 'By torch.profiler: operators and kernels of each process. Open them at ui.perfetto.dev, too.' }), make('ul', { class: 'card files' }, ...profiles.map(({ name, size: bytes, time }) => make('li', {}, make('a', { class: 'link', download: name, href: `/api/profile?${queryOf({ run: this.run.id, name })}`, text: name }), make('small', { text: `${size(bytes)} · ${moment(time)}` }))))));
  }

  // ---- Beside the canvas -----------------------------------------------------------------------------------------

  renderLegend() {
    this.legend.replaceChildren(...KINDS.map(([kind, label, , tone]) => {
      const item = make('button', { type: 'button', class: `item ${tone}`, 'aria-pressed': String(!this.canvas.hidden.has(kind)) }, make('i', {}), make('span', { text: label }));
      item.addEventListener('click', () => {
        if (!this.canvas.hidden.delete(kind)) this.canvas.hidden.add(kind);
        item.setAttribute('aria-pressed', String(!this.canvas.hidden.has(kind)));
        this.canvas.refresh();
      });
      return item;
    }));
  }

  renderTotals() {
    const { totals, lanes, names, start, finish } = this.shown;
    const rows = new Map();
    totals.forEach(([lane, name, seconds, count, longest]) => {
      const [, , process] = lanes[lane];
      const key = `${process}\n${names[name]}`;
      const row = rows.get(key) || { process, name: names[name], seconds: 0, count: 0, longest: 0 };
      row.seconds += seconds;
      row.count = count === null ? null : row.count + count;
      row.longest = longest === null ? null : Math.max(row.longest, longest);
      rows.set(key, row);
    });
    const found = [...rows.values()].sort((one, other) => other.seconds - one.seconds).slice(0, 60);
    const cell = (text) => make('td', { text });
    const head = ['process', 'span', 'total', 'share', 'count', 'mean', 'longest'].map((text) => make('th', { scope: 'col', text }));
    const body = found.map(({ process, name, seconds, count, longest }) => make(
      'tr', {}, make('th', { scope: 'row', text: process }), make('td', { class: kindOf(name)[3] }, make('i', { 'aria-hidden': 'true' }), name), cell(lasting(seconds)),
      cell(`${(100 * seconds / Math.max(1e-9, Math.min(finish, this.end) - start)).toFixed(1)}%`), cell(count === null ? '–' : count.toLocaleString('en-US')), cell(count ? lasting(seconds / count) : '–'), cell(longest === null ? '–' : lasting(longest)),
    ));
    this.totals.replaceChildren(make('section', {}, make('h2', { text: 'What took how long' }), make('p', { class: 'help', text: 'Of the part in view, with half as much again at both sides. Spans of tasks that ran at the same time add up, so a share may be above 100%.' }), wideTable(head, body, { 'data-test': 'totals', 'aria-label': 'What took how long' })));
  }

  describe(place) {
    const { spans, lanes, names, origin } = this.shown;
    const [, , process, , lane] = lanes[spans.lane[place]];
    const [start, length] = [spans.start[place] / 1e6, spans.length[place] / 1e6];
    return { name: names[spans.name[place]], process, lane, start, length, offset: spans.offset[place], at: origin === null ? null : origin + start };
  }

  async argumentsOf(offset) {
    if (!this.args.has(offset)) {
      const found = await ask('timeline/span', { run: this.run.id, offset }).catch(() => ({ args: {} }));
      if (this.args.size > 500) this.args.clear();
      this.args.set(offset, found.args);
    }
    return this.args.get(offset);
  }

  async select(place) {
    const chosen = this.describe(place);
    this.canvas.selected = chosen;
    this.canvas.refresh();
    const found = await this.argumentsOf(chosen.offset);
    if (this.canvas.selected !== chosen) return;
    const rows = [['process', `${chosen.process} · ${chosen.lane}`], ['began', `${clock(chosen.start, 1e-4)} after the start${chosen.at === null ? '' : `, ${new Date(1000 * chosen.at).toISOString().slice(11, 23)} UTC`}`], ['took', lasting(chosen.length)], ...Object.entries(found).map(([key, value]) => [key, String(value)])];
    this.details.replaceChildren(
      make('b', { text: chosen.name }), make('dl', {}, ...rows.flatMap(([key, value]) => [make('dt', { text: key }), make('dd', { text: value })])),
      make('button', { type: 'button', text: 'zoom to it', on: { click: () => this.show(chosen.start - 0.1 * chosen.length, chosen.start + 1.1 * chosen.length) } }),
      make('button', { type: 'button', text: 'close', on: { click: () => { this.canvas.selected = null; this.canvas.refresh(); this.details.replaceChildren(); } } }),
    );
  }

  // Chooses the next or the previous span in the row of the one that is chosen, or the first one that begins in view.
  step(by) {
    if (!this.shown) return;
    const { spans } = this.shown;
    const chosen = this.canvas.selected;
    const sorted = (lane) => (this.canvas.byLane.get(lane) || []).slice().sort((one, other) => spans.start[one] - spans.start[other] || spans.depth[one] - spans.depth[other]);
    let next;
    if (chosen) {
      const all = sorted(spans.lane[spans.offset.indexOf(chosen.offset)]);
      next = all[all.findIndex((place) => spans.offset[place] === chosen.offset) + by];
    } else {
      const rows = this.canvas.rows.filter((row) => row.lane !== undefined).map((row) => sorted(row.lane));
      const inView = rows.map((all) => all.find((place) => spans.start[place] / 1e6 >= this.canvas.window[0]));
      next = inView.find((place) => place !== undefined) ?? rows.find((all) => all.length)?.at(-1);
    }
    if (next === undefined) return;
    this.select(next);
    const start = spans.start[next] / 1e6;
    const [from, to] = this.canvas.window;
    if (start < from || start > to) this.show(start - (to - from) / 4, start + 0.75 * (to - from));
  }

  // ---- Pointer and keys ------------------------------------------------------------------------------------------

  listen() {
    const { canvas } = this.canvas;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const fingers = new Map();
    let began = null;
    canvas.addEventListener('pointerdown', (event) => {
      if (event.button !== 0) return;
      const [x, y] = place(event);
      fingers.set(event.pointerId, x);
      began = { x, y, window: this.canvas.window, isPan: event.shiftKey || event.pointerType !== 'mouse' };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener('pointermove', (event) => {
      const [x, y] = place(event);
      if (!began) {
        this.point(x, y);
        return;
      }
      const [start, end] = began.window;
      if (fingers.size === 2) {
        const before = [...fingers.values()];
        fingers.set(event.pointerId, x);
        const after = [...fingers.values()];
        const factor = Math.abs(before[0] - before[1]) / Math.max(1, Math.abs(after[0] - after[1]));
        this.zoom(factor, this.canvas.time((after[0] + after[1]) / 2));
        began = { ...began, hasMoved: true, window: this.canvas.window, x };
        return;
      }
      fingers.set(event.pointerId, x);
      began.hasMoved ||= Math.abs(x - began.x) > 5;
      if (!began.hasMoved) return;
      if (began.isPan) this.show(start - ((x - began.x) / this.canvas.plot) * (end - start), end - ((x - began.x) / this.canvas.plot) * (end - start));
      else {
        this.canvas.drag = [Math.max(this.canvas.left, began.x), Math.max(this.canvas.left, x)];
        this.canvas.refresh();
      }
    });
    const finish = (event) => {
      fingers.delete(event.pointerId);
      if (!began || fingers.size) return;
      const { x, y, hasMoved } = began;
      const { drag } = this.canvas;
      began = null;
      this.canvas.drag = null;
      if (event.type === 'pointercancel') this.canvas.refresh();
      else if (drag) this.show(this.canvas.time(Math.min(...drag)), this.canvas.time(Math.max(...drag)));
      else if (!hasMoved) this.click(x, y);
    };
    canvas.addEventListener('pointerup', finish);
    canvas.addEventListener('pointercancel', finish);
    canvas.addEventListener('pointerleave', () => this.point(-1, -1));
    canvas.addEventListener('dblclick', () => this.show(this.first, this.end));
    canvas.addEventListener('wheel', (event) => {
      const isZoom = event.ctrlKey || event.metaKey;
      const isMove = !isZoom && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY));
      if (!isZoom && !isMove) return;
      event.preventDefault();
      if (isZoom) this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.006), this.canvas.time(place(event)[0]));
      else this.move((event.shiftKey ? event.deltaY || event.deltaX : event.deltaX) / this.canvas.plot);
    }, { passive: false });
    canvas.addEventListener('keydown', (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      ArrowLeft: () => this.move(-0.25), ArrowRight: () => this.move(0.25), '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2),
      ArrowUp: () => { this.canvas.scroller.scrollTop -= 60; }, ArrowDown: () => { this.canvas.scroller.scrollTop += 60; },
      Escape: () => this.show(this.first, this.end), '.': () => this.step(1), ',': () => this.step(-1), '/': () => this.filter.focus(), f: () => this.setFollowing(!this.isFollowing),
    };
    if (!acts[event.key] || !this.found) return;
    event.preventDefault();
    acts[event.key]();
  }

  click(x, y) {
    const hit = this.shown ? this.canvas.at(x, y) : null;
    if (hit?.pid !== undefined) this.canvas.toggle(hit.pid);
    else if (hit?.span !== undefined) this.select(hit.span);
    else if (hit?.mark !== undefined) {
      const { start, length } = this.shown.marks;
      this.show(start[hit.mark] / 1e6 - 4 * length, start[hit.mark] / 1e6 + 5 * length);
    }
  }

  // Says what is under the pointer.
  point(x, y) {
    const hit = this.shown && x >= 0 ? this.canvas.at(x, y) : null;
    const { tip } = this.canvas;
    if (hit?.span !== this.canvas.hot?.span || hit?.mark !== this.canvas.hot?.mark) {
      this.canvas.hot = hit;
      this.canvas.refresh();
      clearTimeout(this.pointing);
      this.renderTip(hit);
    }
    this.canvas.canvas.style.cursor = hit && (hit.pid !== undefined || hit.span !== undefined || hit.mark !== undefined) ? 'pointer' : 'crosshair';
    tip.hidden = !tip.childElementCount;
    const { width } = this.canvas;
    tip.style.left = `${Math.min(Math.max(0, x + 14), Math.max(0, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18}px`;
  }

  renderTip(hit) {
    const { tip } = this.canvas;
    const { marks, names } = this.shown || {};
    if (hit?.span !== undefined) {
      const { name, length, offset } = this.describe(hit.span);
      tip.replaceChildren(make('b', { text: name }), make('span', { text: lasting(length) }));
      this.pointing = setTimeout(async () => {
        const found = await this.argumentsOf(offset);
        if (this.canvas.hot === hit) tip.append(...Object.entries(found).map(([key, value]) => make('small', { text: `${key}: ${value}` })));
      }, 60);
    } else if (hit?.mark !== undefined) {
      const count = marks.count === null ? 'several spans' : `${marks.count[hit.mark].toLocaleString('en-US')} spans`;
      tip.replaceChildren(make('b', { text: names[marks.name[hit.mark]] }), make('span', { text: `${count}, busy ${(100 * marks.share[hit.mark]).toFixed(0)}% of ${lasting(marks.length)}` }));
    } else tip.replaceChildren();
  }
}

VIEWS.timeline = {
  at: 20, label: 'Timeline', make: (run, place) => new TimelineView(run, place), isThere: ({ hasTrace, profiles }) => hasTrace || profiles.length > 0,
};
