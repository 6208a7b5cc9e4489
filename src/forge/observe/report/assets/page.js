// The page of a report: head, bar, charts by section, samples, and what else is known.

function rememberTheme() {}  // a file has no place to remember it

function pageHead(table) {
  const { run, facts, tiles } = data;
  const isWhole = run.totalSteps !== null && run.lastStep >= run.totalSteps;
  const steps = run.totalSteps ? `step ${run.lastStep} of ${run.totalSteps}` : `step ${run.lastStep}`;
  return make(
    'header', { class: 'head' },
    make('div', { class: 'brand' }, brandMark(), make('span', { text: 'TorchForge' }), themeButton()),
    make('h1', { text: run.name }),
    make('p', { class: 'state' }, make('b', { class: isWhole ? 'done' : 'going', text: steps }), run.lastTime === null ? ' · no metrics yet' : ` · ${duration(run.lastTime - run.firstTime)} · last metrics ${moment(run.lastTime)}`),
    run.totalSteps && !isWhole ? progressBar(run.lastStep / run.totalSteps) : null,
    factList(facts),
    make('div', { class: 'tiles' }, ...tiles.map((each) => tile(each, table))),
    noteList(data.notes),
  );
}

function configuration() {
  const changes = data.changes.length
    ? make('p', { text: `Changed while the run ran: ${data.changes.join('; ')}.` })
    : '';
  return make('details', { class: 'config' }, make('summary', { text: 'Configuration' }), changes, make('pre', { text: data.config }));
}

function build() {
  const table = new Table(data);
  const board = new Board(table);
  const samples = data.samples.items.length ? new Samples() : null;
  const told = samples
    ? `${data.samples.items.length.toLocaleString('en-US')} of ${data.samples.written.toLocaleString('en-US')} samples. Keys: ← → for the neighbours, / to search.`
    : 'This run wrote no samples, or none was asked for.';
  const jump = samples && ((step) => {
    samples.goTo(step);
    document.getElementById('samples').scrollIntoView({ block: 'start' });
  });
  document.getElementById('report').append(
    pageHead(table),
    toolBar(board, { jump }),
    make(
      'main', {},
      ...chartSections(data.charts, board),
      leagueTable(data.league) || '',
      make('section', { id: 'samples' }, make('h2', { text: 'Samples' }), make('p', { class: 'help', text: told }), samples ? samples.node : null),
      ledgerTable(data.ledger) || '',
      data.config ? configuration() : '',
    ),
    make('footer', { text: `Made by TorchForge ${data.run.forge} on ${moment(data.run.madeAt)}. This page is one file and asks no server for anything.` }),
  );
}

build();
