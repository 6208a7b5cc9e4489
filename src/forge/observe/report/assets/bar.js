// The bar above the charts: what is under the cursor, and how curves are drawn.

function toolBar(board, { jump = null, more = [] } = {}) {
  const reading = make('span', { class: 'reading', 'data-test': 'reading', role: 'status' });
  const go = make('button', { type: 'button', text: 'its samples', hidden: true });
  const reset = make('button', { type: 'button', text: 'whole run', hidden: true, on: { click: () => board.show({ range: null }) } });
  const slider = make('input', { type: 'range', min: 0, max: 0.95, step: 0.05, value: 0, 'aria-label': 'Smoothing' });
  slider.addEventListener('input', () => board.show({ smoothing: Number(slider.value) }));
  if (jump) go.addEventListener('click', () => jump(board.stepAt(board.cursor)));
  const axes = make('select', { 'aria-label': 'Horizontal axis' });
  axes.addEventListener('change', () => board.show({ axis: axes.value }));
  const tell = () => {
    const { cursor, pinned, range } = board;
    reading.textContent = cursor === null ? 'Point at a curve; click to hold the step, drag to zoom' : `${board.cursorText()}${pinned ? ' · held' : ''}`;
    go.hidden = !(pinned && jump);
    reset.hidden = range === null;
    slider.value = board.smoothing;
    offerAxes(axes, board);
  };
  board.listeners.push(tell);
  tell();
  return make('nav', { class: 'bar', 'aria-label': 'Charts' }, reading, go, reset, ...more, axes, make('label', {}, make('span', { text: 'Smoothing' }), slider));
}

function offerAxes(axes, board) {
  const offered = Object.keys(AXES).filter((axis) => axis === board.axis || board.table.has(axis));
  if (axes.childElementCount !== offered.length) {
    axes.replaceChildren(...offered.map((axis) => make('option', { value: axis, text: `by ${AXES[axis].label}` })));
  }
  axes.value = board.axis;
  axes.hidden = offered.length < 2;
}

function themeButton() {
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
  const button = make('button', { type: 'button', class: 'theme', 'aria-label': 'Light or dark', text: '◐' });
  button.addEventListener('click', () => {
    root.dataset.theme = isDark() ? 'light' : 'dark';
    rememberTheme(root.dataset.theme);
  });
  return button;
}
