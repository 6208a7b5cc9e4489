// Draws the timeline on a canvas: a ruler with the steps, and below it a row for each task of each process.

const ROW = { ruler: 44, head: 24, span: 17, gap: 5 };
const KINDS = [
  ['wait', 'waiting', /^wait/, 'tone7'],
  ['sync', 'new weights', /weights|canary|update|publish|cache/, 'tone2'],
  ['train', 'training', /^train|value batch/, 'tone1'],
  ['score', 'scoring', /score|forward|reward|compare/, 'tone3'],
  ['generate', 'generating', /^(generate|rollout|episode|turn)/, 'tone0'],
  ['save', 'saving, evaluating', /^(save|evaluat|load|checkpoint)/, 'tone4'],
  ['other', 'other', /./, 'tone5'],
];

function kindOf(name) {
  return KINDS.find(([, , pattern]) => pattern.test(name)) || KINDS[KINDS.length - 1];
}

// Seconds with as many digits as a width of a pixel tells apart.
function clock(seconds, resolution) {
  if (resolution >= 1 || seconds >= 3600) return span(seconds);
  const digits = Math.min(6, Math.max(1, Math.ceil(-Math.log10(Math.max(resolution, 1e-7)))));
  if (seconds >= 60) return `${Math.floor(seconds / 60)}:${(seconds % 60).toFixed(digits).padStart(3 + digits, '0')}`;
  return `${seconds.toFixed(digits)} s`;
}

function lasting(seconds) {
  if (seconds >= 100) return span(seconds);
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  return `${Number((1e6 * seconds).toPrecision(3))} µs`;
}

class TimelineCanvas {
  constructor(changed) {
    Object.assign(this, { changed, found: null, rows: [], height: 0, closed: new Set(), deepest: new Map(), window: [0, 1], hot: null, selected: null, query: '', hidden: new Set() });
    this.canvas = make('canvas', { class: 'timeline', tabindex: 0, role: 'img', 'data-keys': true, 'data-test': 'timeline' });
    this.spacer = make('div', { class: 'spacer' });
    this.tip = make('div', { class: 'tip', hidden: true, 'data-test': 'tip' });
    this.scroller = make('div', { class: 'timelinebox' }, this.canvas, this.spacer);
    this.node = make('div', { class: 'timelineframe' }, this.scroller, this.tip);
    this.scroller.addEventListener('scroll', () => this.refresh());
    this.observers = [new ResizeObserver(() => this.resize())];
    this.observers[0].observe(this.scroller);
    const themes = new MutationObserver(() => this.restyle());
    themes.observe(document.documentElement, { attributes: true, attributeFilter: ['data-theme'] });
    this.observers.push(themes);
    this.dark = matchMedia('(prefers-color-scheme: dark)');
    this.onDark = () => this.restyle();
    this.dark.addEventListener('change', this.onDark);
    this.restyle();
  }

  close() {
    this.observers.forEach((observer) => observer.disconnect());
    this.dark.removeEventListener('change', this.onDark);
  }

  restyle() {
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(['paper', 'card', 'ink', 'soft', 'faint', 'edge', 'grid', 'accent', ...KINDS.map(([, , , tone]) => tone)].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.refresh();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.scroller;
    if (!width || (width === this.width && height === this.viewHeight)) return;
    const scale = Math.min(3, window.devicePixelRatio || 1);
    Object.assign(this, { width, viewHeight: height, scale, left: width < 560 ? 92 : 196 });
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.changed();
    this.refresh();
  }

  // ---- Rows ------------------------------------------------------------------------------------------------------

  take(found) {
    this.found = found;
    const { spans, marks } = found;
    const note = ({ lane, depth }) => lane.forEach((number, place) => { if (depth[place] > (this.deepest.get(number) || 0)) this.deepest.set(number, depth[place]); });
    note(spans);
    note(marks);
    this.byLane = new Map();
    spans.lane.forEach((lane, place) => { if (!this.byLane.has(lane)) this.byLane.set(lane, []); this.byLane.get(lane).push(place); });
    this.marksOf = new Map();
    marks.lane.forEach((lane, place) => { if (!this.marksOf.has(lane)) this.marksOf.set(lane, []); this.marksOf.get(lane).push(place); });
    this.arrange();
  }

  arrange() {
    if (!this.found) return;
    const processes = new Map();
    this.found.lanes.forEach(([pid, , process, host, name], lane) => {
      if (!processes.has(pid)) processes.set(pid, { pid, process, host, lanes: [] });
      processes.get(pid).lanes.push({ lane, name });
    });
    const hosts = new Set([...processes.values()].map(({ host }) => host));
    let y = 0;
    this.rows = [];
    const ordered = [...processes.values()].sort((one, other) => (one.process === 'controller' ? -1 : other.process === 'controller' ? 1 : one.process.localeCompare(other.process, 'en', { numeric: true })));
    for (const { pid, process, host, lanes } of ordered) {
      const isClosed = this.closed.has(pid);
      this.rows.push({ y, height: ROW.head, pid, label: hosts.size > 1 && host ? `${process} · ${host}` : process, isClosed, count: lanes.length });
      y += ROW.head;
      if (isClosed) continue;
      for (const { lane, name } of lanes) {
        const height = ROW.span * (1 + (this.deepest.get(lane) || 0)) + ROW.gap;
        this.rows.push({ y, height, lane, label: name });
        y += height;
      }
    }
    this.height = y;
    this.spacer.style.height = `${Math.max(0, y + ROW.ruler - (this.viewHeight || 0)) + 8}px`;
    this.scroller.style.height = `${Math.min(Math.max(240, y + ROW.ruler + 10), Math.max(320, Math.round(0.68 * window.innerHeight)))}px`;
    this.resize();
    this.refresh();
  }

  toggle(pid) {
    if (!this.closed.delete(pid)) this.closed.add(pid);
    this.arrange();
  }

  // ---- Places ----------------------------------------------------------------------------------------------------

  get plot() {
    return Math.max(1, this.width - this.left - 8);
  }

  x(seconds) {
    const [start, end] = this.window;
    return this.left + ((seconds - start) / (end - start)) * this.plot;
  }

  time(x) {
    const [start, end] = this.window;
    return start + ((x - this.left) / this.plot) * (end - start);
  }

  rowAt(y) {
    const at = y - ROW.ruler + this.scroller.scrollTop;
    return y < ROW.ruler ? null : this.rows.find((row) => at >= row.y && at < row.y + row.height) || null;
  }

  // What is at a place of the canvas: a span, several together, the head of a process, or nothing.
  at(x, y) {
    const row = this.rowAt(y);
    if (!row) return null;
    if (row.pid !== undefined) return { pid: row.pid };
    if (x < this.left) return null;
    const depth = Math.floor((y - ROW.ruler + this.scroller.scrollTop - row.y) / ROW.span);
    const { spans, marks } = this.found;
    const [time, slack] = [this.time(x), 1.5 * (this.window[1] - this.window[0]) / this.plot];
    let best = null;
    for (const place of this.byLane.get(row.lane) || []) {
      const [start, end] = [spans.start[place] / 1e6, (spans.start[place] + spans.length[place]) / 1e6];
      if (spans.depth[place] === depth && time >= start - slack && time <= end + slack && !this.isHidden(spans.name[place]) && (best === null || spans.length[place] < spans.length[best])) best = place;
    }
    if (best !== null) return { span: best };
    const mark = (this.marksOf.get(row.lane) || []).find((place) => marks.depth[place] === depth && time >= marks.start[place] / 1e6 && time <= marks.start[place] / 1e6 + marks.length && !this.isHidden(marks.name[place]));
    return mark === undefined ? null : { mark };
  }

  isHidden(name) {
    return this.hidden.has(kindOf(this.found.names[name])[0]);
  }

  // ---- Drawing ---------------------------------------------------------------------------------------------------

  refresh() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    if (!this.width || !this.found) return;
    const context = this.canvas.getContext('2d');
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.width, this.viewHeight);
    this.context = context;
    const top = this.scroller.scrollTop;
    const shown = this.rows.filter((row) => row.y + row.height >= top && row.y <= top + this.viewHeight);
    this.drawSteps();
    shown.forEach((row) => this.drawRow(row, ROW.ruler + row.y - top));
    shown.forEach((row) => this.drawLabel(row, ROW.ruler + row.y - top));
    this.drawRuler();
    this.drawSelection();
  }

  drawSteps() {
    const { context, colours, found: { steps } } = this;
    for (let place = 1; place < steps.length; place += 1) {
      const [from, to] = [Math.max(this.left, this.x(steps[place - 1][1])), Math.min(this.width, this.x(steps[place][1]))];
      if (to < this.left || from > this.width || steps[place][0] % 2) continue;
      context.fillStyle = colours.grid;
      context.globalAlpha = 0.55;
      context.fillRect(from, ROW.ruler, to - from, this.viewHeight);
      context.globalAlpha = 1;
    }
  }

  drawRow(row, y) {
    const { context, colours } = this;
    context.fillStyle = colours.edge;
    if (row.pid !== undefined) {
      context.fillStyle = colours.paper;
      context.fillRect(0, y, this.width, row.height);
      return;
    }
    context.fillRect(this.left, y + row.height - 0.5, this.width, 0.5);
    context.save();
    context.beginPath();
    context.rect(this.left, y, this.plot + 8, row.height);
    context.clip();
    this.drawMarks(row, y);
    this.drawSpans(row, y);
    context.restore();
  }

  isDim(name) {
    return this.query !== '' && !name.toLowerCase().includes(this.query);
  }

  drawMarks(row, y) {
    const { context, colours, found: { marks, names } } = this;
    const width = Math.max(1, (marks.length / (this.window[1] - this.window[0])) * this.plot);
    for (const place of this.marksOf.get(row.lane) || []) {
      const x = this.x(marks.start[place] / 1e6);
      const name = names[marks.name[place]];
      if (x + width < this.left || x > this.width || this.isHidden(marks.name[place])) continue;
      context.globalAlpha = (this.isDim(name) ? 0.2 : 1) * (0.25 + 0.6 * marks.share[place]);
      context.fillStyle = colours[kindOf(name)[3]];
      context.fillRect(x, y + 2 + ROW.span * marks.depth[place], width, ROW.span - 2);
    }
    context.globalAlpha = 1;
  }

  drawSpans(row, y) {
    const { context, colours, found: { spans, names } } = this;
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'middle';
    for (const place of this.byLane.get(row.lane) || []) {
      const [x, end] = [this.x(spans.start[place] / 1e6), this.x((spans.start[place] + spans.length[place]) / 1e6)];
      if (end < this.left || x > this.width || this.isHidden(spans.name[place])) continue;
      const name = names[spans.name[place]];
      const [from, width] = [Math.max(x, this.left - 4), Math.max(1, Math.min(end, this.width + 4) - Math.max(x, this.left - 4))];
      const top = y + 2 + ROW.span * spans.depth[place];
      const isHot = this.hot?.span === place || this.selected?.offset === spans.offset[place];
      context.globalAlpha = this.isDim(name) ? 0.16 : isHot ? 1 : 0.84;
      context.fillStyle = colours[kindOf(name)[3]];
      context.fillRect(from, top, width > 3 ? width - 0.6 : width, ROW.span - 2);
      if (isHot) {
        context.strokeStyle = colours.ink;
        context.strokeRect(from + 0.5, top + 0.5, Math.max(1, width - 1), ROW.span - 3);
      }
      if (width > 34 && !this.isDim(name)) {
        const inside = Math.max(from, this.left);
        context.globalAlpha = 1;
        context.fillStyle = colours.card;
        const text = fitted(name, end - inside - 8);
        if (text) context.fillText(text, inside + 4, top + ROW.span / 2 - 0.5);
      }
    }
    context.globalAlpha = 1;
  }

  drawLabel(row, y) {
    const { context, colours } = this;
    context.textBaseline = 'middle';
    if (row.pid !== undefined) {
      context.fillStyle = colours.ink;
      context.font = '600 12px system-ui, sans-serif';
      context.fillText(`${row.isClosed ? '▸' : '▾'} ${row.label}${row.isClosed ? ` (${row.count})` : ''}`, 8, y + row.height / 2);
      return;
    }
    context.fillStyle = colours.card;
    context.fillRect(0, y, this.left - 2, row.height);
    context.fillStyle = colours.soft;
    context.font = '11.5px system-ui, sans-serif';
    context.fillText(fitted(row.label, this.left - 32), 22, y + 2 + ROW.span / 2);
  }

  drawRuler() {
    const { context, colours, found: { steps } } = this;
    const [start, end] = this.window;
    context.fillStyle = colours.card;
    context.fillRect(0, 0, this.width, ROW.ruler);
    context.fillStyle = colours.edge;
    context.fillRect(0, ROW.ruler - 0.5, this.width, 0.5);
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'middle';
    context.fillStyle = colours.faint;
    const unit = (end - start) / Math.max(2, this.plot / 100);
    for (const tick of (end - start > 5 * this.plot / 100 ? timeTicks : roundTicks)(start, end, this.plot / 100)) {
      const x = this.x(tick);
      if (x < this.left || x > this.width - 20) continue;
      context.fillRect(x, ROW.ruler - 6, 1, 5);
      context.fillText(clock(tick, unit), x + 4, ROW.ruler - 11);
    }
    context.fillStyle = colours.soft;
    context.fillText('step', 22, 12);
    context.fillText('time', 22, ROW.ruler - 11);
    let free = this.left;
    for (let place = 1; place < steps.length; place += 1) {
      const [from, to] = [this.x(steps[place - 1][1]), this.x(steps[place][1])];
      const text = steps[place][0].toLocaleString('en-US');
      const x = Math.max(from, this.left) + (Math.min(to, this.width) - Math.max(from, this.left)) / 2 - 3 * text.length;
      context.fillStyle = colours.edge;
      if (to > this.left && to < this.width) context.fillRect(to, 4, 1, 16);
      context.fillStyle = colours.ink;
      if (to > this.left && from < this.width && x > free) {
        context.fillText(text, x, 12);
        free = x + 7 * text.length + 8;
      }
    }
  }

  drawSelection() {
    if (!this.drag) return;
    const { context, colours } = this;
    const [from, to] = [Math.min(...this.drag), Math.max(...this.drag)];
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.16;
    context.fillRect(from, 0, to - from, this.viewHeight);
    context.globalAlpha = 1;
    context.fillStyle = colours.ink;
    context.fillText(lasting(this.time(to) - this.time(from)), from + 4, ROW.ruler + 10);
  }
}

// As much of a text as fits, by the usual width of a letter.
function fitted(text, width) {
  const most = Math.floor(width / 6.1);
  if (most < 2) return '';
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
