// The charts. They share one board: the place under the cursor, the range, the axis, and how much curves are smoothed.

const PLOT = { height: 196, tall: 360, top: 10, right: 12, bottom: 22 };

class Board {
  // A lazy board draws only charts that are on the screen, and at most once for each frame.
  constructor(table, { lazy = false } = {}) {
    Object.assign(this, { table, lazy, detail: null, charts: [], listeners: [] });
    Object.assign(this, { axis: 'step', range: null, cursor: null, pinned: false, smoothing: 0 });
    this.look();
  }

  // The rows that are drawn: those of a part of the run in more detail, where they are there.
  get shown() {
    return this.range && this.detail ? this.detail : this.table;
  }

  // From where to where charts reach.
  look() {
    const xs = this.table.xs(this.axis);
    const [low, high] = this.range || (xs.length ? [xs[0], xs[xs.length - 1]] : [0, 1]);
    this.span = low === high ? [low - 1, high + 1] : [low, high];
  }

  snap(x) {
    const table = this.shown;
    return table.length ? table.xs(this.axis)[table.nearest(this.axis, Math.min(this.span[1], Math.max(this.span[0], x)))] : null;
  }

  // The step that stands at a place of the axis.
  stepAt(x) {
    const table = this.shown;
    return table.length ? table.steps[table.nearest(this.axis, x)] : null;
  }

  // Where the cursor is, in words.
  cursorText() {
    const { axis, cursor } = this;
    const place = { time: () => `, after ${span(cursor)}`, tokens: () => `, ${figure(cursor)} tokens` }[axis];
    return `Step ${this.stepAt(cursor)}${place ? place() : ''}`;
  }

  // Without `pin` the cursor follows the pointer unless it is pinned; true pins it, false lets it go.
  point(x, pin) {
    if (pin === undefined && (this.pinned || x === this.cursor)) return;
    this.pinned = pin === true && x !== null;
    this.cursor = x;
    this.charts.forEach((chart) => chart.mark());
    this.listeners.forEach((listener) => listener(this, { pin }));
  }

  show(change) {
    if ('axis' in change && change.axis !== this.axis) Object.assign(this, { range: null, detail: null, cursor: null, pinned: false });
    if ('range' in change) this.detail = null;
    Object.assign(this, change);
    this.draw();
    this.listeners.forEach((listener) => listener(this, change));
  }

  // Draws all charts again, because there are other rows.
  draw() {
    this.look();
    this.charts.forEach((chart) => chart.refresh());
  }

  zoom(from, to) {
    let range = [Math.min(from, to), Math.max(from, to)];
    if (this.axis !== 'time') range = [Math.floor(range[0]), Math.ceil(range[1])];
    const table = this.shown;
    const inside = table.after(this.axis, range[1] + 1e-9) - table.after(this.axis, range[0]);
    if (inside > 1 || (table.stride > 1 && range[1] > range[0])) this.show({ range });
  }

  // Zooms by a factor around the cursor, or the middle.
  scale(factor) {
    const [low, high] = this.span;
    const centre = this.cursor ?? (low + high) / 2;
    const xs = this.table.xs(this.axis);
    const [first, last] = [xs[0], xs[xs.length - 1]];
    const range = [Math.max(first, centre - (centre - low) * factor), Math.min(last, centre + (high - centre) * factor)];
    if (range[0] <= first && range[1] >= last) this.show({ range: null });
    else this.zoom(...range);
  }
}

function axisTicks(axis, low, high, count) {
  if (axis === 'time') return timeTicks(low, high, count).map((tick) => [tick, span(tick)]);
  if (axis === 'tokens') return roundTicks(low, high, count).map((tick) => [tick, figure(tick)]);
  return stepTicks(low, high, count).map((tick) => [tick, tick.toLocaleString('en-US')]);
}

class Chart {
  constructor(plan, board) {
    Object.assign(this, { plan, board, isLog: false, isShare: false, isTall: false, isDirty: false, isSeen: !board.lazy, hidden: new Set() });
    this.svg = draw('svg', { class: 'plot', tabindex: 0, role: 'img', 'data-keys': true, 'aria-label': this.summary() });
    this.over = draw('svg', { class: 'plot over', 'aria-hidden': 'true' });
    this.legend = make('div', { class: 'legend' });
    this.values = new Map();
    plan.series.forEach((series, place) => this.legend.append(this.legendItem(series, place)));
    this.node = make(
      'section', { class: 'card chart', 'data-title': plan.title },
      make('header', {}, make('h3', { text: plan.title }), this.switches()),
      plan.help ? make('p', { class: 'help', title: plan.help, text: plan.help }) : null,
      make('div', { class: 'plotbox' }, this.svg, this.over),
      this.legend,
    );
    this.listen();
    board.charts.push(this);
    this.watch();
  }

  watch() {
    new ResizeObserver(() => this.refresh()).observe(this.svg);
    if (!this.board.lazy) return;
    new IntersectionObserver((entries) => {
      this.isSeen = entries[entries.length - 1].isIntersecting;
      if (this.isSeen && this.isDirty) this.refresh();
    }, { rootMargin: '300px' }).observe(this.svg);
  }

  // The table that a series is read from: of one run, or of the run that it names.
  table(series) {
    return series.table || this.board.shown;
  }

  summary() {
    const told = this.plan.series.map((series) => {
      const known = this.table(series).values(series.key);
      const unit = this.plan.unit;
      return `${series.label} from ${figure(known[0], unit)} to ${figure(known[known.length - 1], unit)}`;
    });
    return `${this.plan.title}: ${told.join(', ')}`;
  }

  switches() {
    const box = make('div', { class: 'switches' });
    const add = (words, name, label) => {
      const button = make('button', { class: 'switch', type: 'button', 'aria-pressed': 'false', 'aria-label': label, title: label, text: words });
      button.addEventListener('click', () => {
        this[name] = !this[name];
        button.setAttribute('aria-pressed', String(this[name]));
        this.node.classList.toggle('tall', this.isTall);
        this.render();
      });
      box.append(button);
    };
    if (this.plan.log && this.hasPositive()) add('log', 'isLog');
    if (this.plan.stack) add('share', 'isShare');
    if (this.board.lazy) add('⤢', 'isTall', 'Larger');
    return box;
  }

  // A figure that is often 0 or below has no place on a logarithmic scale.
  hasPositive() {
    const known = this.plan.series.flatMap((series) => this.table(series).values(series.key));
    return known.filter((value) => value > 0).length > 0.8 * known.length;
  }

  legendItem(series, place) {
    const value = make('b', { text: '' });
    this.values.set(series, value);
    const item = make(
      'button', { class: `item tone${(series.tone ?? place) % 8}`, type: 'button', 'aria-pressed': 'true', title: series.key },
      make('i', {}), make('span', { text: series.label }), value,
    );
    item.addEventListener('click', () => {
      const isHidden = !this.hidden.delete(series);
      if (isHidden) this.hidden.add(series);
      item.setAttribute('aria-pressed', String(!isHidden));
      this.render();
    });
    return item;
  }

  // ---- What is drawn ---------------------------------------------------------------------------------------------

  // The rows of a table in the visible range.
  rows(table) {
    const { axis, span: [low, high] } = this.board;
    return [table.after(axis, low), table.after(axis, high + 1e-9)];
  }

  // The known points of a metric in the visible range; one that follows a NaN begins a new piece of line.
  points(table, column, key) {
    const odd = new Set(table.nonfinite[key] || []);
    const xs = table.xs(this.board.axis);
    const [from, to] = this.rows(table);
    const points = [];
    let begins = false;
    for (let row = from; row < to; row += 1) {
      const value = column[row] ?? null;
      if (value === null && odd.size && odd.has(table.steps[row])) begins = true;
      if (value === null || (this.isLog && value <= 0)) continue;
      points.push([xs[row], value, begins]);
      begins = false;
    }
    return points;
  }

  layers() {
    return this.plan.stack ? this.stackedLayers() : this.lineLayers();
  }

  lineLayers() {
    const past = this.board.smoothing;
    return this.visible().map(({ series, place }) => {
      const table = this.table(series);
      const raw = this.points(table, table.columns[series.key] || [], series.key);
      const isDense = raw.length > 12;
      const line = isDense ? smooth(raw, past).map((point, at) => [point[0], point[1], raw[at][2]]) : raw;
      const layer = { series, place, line, faint: isDense && past ? raw : null, dots: raw.length <= 16 };
      if (series.band) {
        const spread = new Map(smooth(this.points(table, table.columns[series.band] || [], series.band), isDense ? past : 0));
        const inside = line.filter(([x]) => spread.has(x));
        layer.upper = inside.map(([x, value]) => [x, value + spread.get(x)]);
        layer.lower = inside.map(([x, value]) => [x, value - spread.get(x)]);
      } else if (table.low[series.key] && table.stride > 1) {
        layer.upper = this.points(table, table.high[series.key], series.key);
        layer.lower = this.points(table, table.low[series.key], series.key);
        layer.reach = true;
      }
      return layer;
    });
  }

  stackedLayers() {
    const visible = this.visible();
    const past = this.board.smoothing;
    const table = this.board.shown;
    const xs = table.xs(this.board.axis);
    const [from, to] = this.rows(table);
    const columns = visible.map(({ series }) => {
      const known = [];
      for (let row = from; row < to; row += 1) known.push([xs[row], Math.max(0, (table.columns[series.key] || [])[row] || 0)]);
      return smooth(known, known.length > 12 ? past : 0);
    });
    const places = (columns[0] || []).map(([x]) => x);
    const sums = places.map((_, at) => columns.reduce((sum, column) => sum + column[at][1], 0));
    const scale = sums.map((sum) => (this.isShare ? (sum ? 1 / sum : 0) : 1));
    let base = places.map((x) => [x, 0]);
    return visible.map(({ series, place }, number) => {
      const upper = base.map(([x, below], at) => [x, below + columns[number][at][1] * scale[at]]);
      const layer = { series, place, line: upper, upper, lower: base, solid: true };
      base = upper;
      return layer;
    });
  }

  visible() {
    return this.plan.series.map((series, place) => ({ series, place: series.tone ?? place })).filter(({ series }) => !this.hidden.has(series));
  }

  extent(layers) {
    let [low, high] = [Infinity, -Infinity];
    for (const { line, faint, upper, lower } of layers) {
      for (const points of [line, faint, upper, lower]) {
        for (const [, value] of points || []) {
          if (this.isLog && value <= 0) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    if (low > high) return [0, 1];
    if (this.isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 1.2), Math.max(0, high * 1.2)];
    if (low > 0 && low < 0.5 * high) low = 0;
    const room = (high - low) * 0.06;
    return [low === 0 ? 0 : low - room, high + (this.isShare ? 0 : room)];
  }

  // Draws again, unless nobody sees it.
  refresh() {
    if (!this.board.lazy) {
      this.render();
      return;
    }
    this.isDirty = true;
    if (!this.isSeen || this.frameAsked) return;
    this.frameAsked = true;
    requestAnimationFrame(() => {
      this.frameAsked = false;
      this.render();
    });
  }

  render() {
    const width = this.svg.clientWidth;
    if (!width) return;
    this.isDirty = false;
    const height = this.isTall ? PLOT.tall : PLOT.height;
    const layers = this.layers();
    const [low, high] = this.extent(layers);
    const ticks = this.isLog ? logTicks(low, high, 5) : roundTicks(low, high, this.isTall ? 7 : 4);
    const unit = this.isShare ? '%' : this.plan.unit === '%' ? '%' : '';
    const labels = ticks.map((tick) => figure(tick, unit));
    const left = 12 + 6.3 * Math.max(4, ...labels.map((label) => label.length));
    const bottom = height - PLOT.bottom;
    this.x = linear(...this.board.span, left, width - PLOT.right);
    this.y = (this.isLog ? logarithmic : linear)(low, high, bottom, PLOT.top);
    this.frame = { left, right: width - PLOT.right, bottom, height };
    [this.svg, this.over].forEach((svg) => svg.setAttribute('viewBox', `0 0 ${width} ${height}`));
    this.cursorMarks = draw('g', { class: 'cursor' });
    this.selection = draw('rect', { class: 'selection', y: PLOT.top, height: bottom - PLOT.top, width: 0 });
    this.svg.replaceChildren(
      ...ticks.map((tick, place) => this.rule(this.y(tick), labels[place])),
      ...this.axisLabels(width),
      ...layers.flatMap((layer) => this.shapes(layer)),
      ...this.oddMarks(),
    );
    this.over.replaceChildren(this.selection, this.cursorMarks); // apart: the curves are not painted again as it moves
    this.drawn = layers;
    this.mark();
  }

  rule(y, label) {
    const { left, right } = this.frame;
    return draw(
      'g', { class: 'rule' },
      draw('line', { x1: left, x2: right, y1: y, y2: y }),
      draw('text', { x: left - 7, y: y + 3.5, 'text-anchor': 'end', text: label }),
    );
  }

  axisLabels(width) {
    const { axis, span: [low, high] } = this.board;
    const { left, right, height } = this.frame;
    const name = draw('text', { class: 'step', x: left - 7, y: height - 6, 'text-anchor': 'end', text: AXES[axis].label });
    const ticks = axisTicks(axis, low, high, Math.max(2, width / 80)).map(([tick, text]) => {
      const x = this.x(tick);
      const anchor = x > right - 14 ? 'end' : x < left + 8 ? 'start' : 'middle';
      return draw('text', { class: 'step', x, y: height - 6, 'text-anchor': anchor, text });
    });
    return [name, ...ticks];
  }

  shapes({ line, faint, upper, lower, place, solid, dots, reach }) {
    const tone = `tone${place % 8}`;
    const shapes = [];
    if (upper) shapes.push(draw('path', { class: `${solid ? 'area' : reach ? 'reach' : 'band'} ${tone}`, d: areaOf(upper, lower, this.x, this.y) }));
    if (faint) shapes.push(draw('path', { class: `faint ${tone}`, d: pathOf(faint, this.x, this.y) }));
    shapes.push(draw('path', { class: `${solid ? 'edge' : 'line'} ${tone}`, d: pathOf(line, this.x, this.y) }));
    if (dots && !solid) {
      line.forEach(([x, value]) => shapes.push(draw('circle', { class: `dot ${tone}`, cx: this.x(x), cy: this.y(value), r: 2.4 })));
    }
    return shapes;
  }

  oddMarks() {
    const [low, high] = this.board.span;
    const { axis } = this.board;
    return this.visible().flatMap(({ series }) => {
      const table = this.table(series);
      return (table.nonfinite[series.key] || []).map((step) => [step, table.xs(axis)[table.nearest('step', step)]])
        .filter(([, x]) => x >= low && x <= high)
        .map(([step, x]) => draw(
          'text', { class: 'odd', x: this.x(x), y: PLOT.top + 7, 'text-anchor': 'middle', text: '×' },
          draw('title', { text: `${series.label} was NaN or infinite at step ${step}` }),
        ));
    });
  }

  // ---- The cursor ------------------------------------------------------------------------------------------------

  mark() {
    if (this.board.lazy && !this.isSeen) return;
    const { cursor, span: [low, high] } = this.board;
    this.values.forEach((node, series) => { node.textContent = this.reading(series, cursor); });
    if (!this.cursorMarks || !this.frame) return;
    if (cursor === null || cursor < low || cursor > high) {
      this.cursorMarks.replaceChildren();
      return;
    }
    const x = this.x(cursor);
    const marks = [draw('line', { x1: x, x2: x, y1: PLOT.top, y2: this.frame.bottom })];
    this.drawn.forEach(({ line, place }) => {
      const point = this.pointAt(line, cursor);
      if (point) marks.push(draw('circle', { class: `tone${place % 8}`, cx: this.x(point[0]), cy: this.y(point[1]), r: 3.6 }));
    });
    this.cursorMarks.replaceChildren(...marks);
  }

  pointAt(line, cursor) {
    return line.find(([at]) => at === cursor);
  }

  // What a metric was at a place of the axis, or last.
  reading(series, cursor) {
    const { unit } = this.plan;
    const { key } = series;
    const table = this.table(series);
    if (!table.length) return '–';
    const row = cursor === null ? table.length - 1 : table.nearest(this.board.axis, cursor);
    if ((table.nonfinite[key] || []).includes(table.steps[row]) && (table.columns[key] || [])[row] === null) return 'NaN or ∞';
    const value = table.known(key, row);
    return value === null ? '–' : figure(value, unit) + (unit && unit !== '%' ? ` ${unit}` : '');
  }

  listen() {
    let start = null;
    const placeOf = (event) => {
      const box = this.svg.getBoundingClientRect();
      const [low, high] = this.board.span;
      const { left, right } = this.frame;
      const part = Math.min(1, Math.max(0, (event.clientX - box.left - left) / (right - left)));
      return low + part * (high - low);
    };
    const offset = (event) => event.clientX - this.svg.getBoundingClientRect().left;
    this.svg.addEventListener('pointermove', (event) => {
      this.board.point(this.board.snap(placeOf(event)));
      if (start === null) return;
      this.selection.setAttribute('x', Math.min(start.offset, offset(event)));
      this.selection.setAttribute('width', Math.abs(offset(event) - start.offset));
    });
    this.svg.addEventListener('pointerdown', (event) => {
      if (event.pointerType !== 'mouse' || event.button !== 0) return;
      start = { offset: offset(event), x: placeOf(event) };
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener('pointerup', (event) => {
      const [began, end] = [start, placeOf(event)];
      start = null;
      if (began !== null && Math.abs(offset(event) - began.offset) > 8) this.board.zoom(began.x, end);
      else this.board.point(this.board.snap(end), !this.board.pinned || event.pointerType !== 'mouse');
    });
    this.svg.addEventListener('pointerleave', () => { if (start === null) this.board.point(null); });
    this.svg.addEventListener('dblclick', () => this.board.show({ range: null }));
    this.svg.addEventListener('keydown', (event) => this.key(event));
  }

  key(event) {
    const { board } = this;
    const table = board.shown;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === 'Escape') {
      board.point(null, true);
      board.show({ range: null });
    } else if (event.key in moves && table.length) {
      const at = board.cursor === null ? table.nearest(board.axis, board.span[1]) : table.nearest(board.axis, board.cursor) + moves[event.key];
      board.point(board.snap(table.xs(board.axis)[Math.min(table.length - 1, Math.max(0, at))]), true);
      event.preventDefault();
    } else if ((event.key === '+' || event.key === '-') && table.length) {
      board.scale(event.key === '+' ? 0.5 : 2);
      event.preventDefault();
    }
  }
}
