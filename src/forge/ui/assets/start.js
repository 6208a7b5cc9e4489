// Begins, and follows the address.

function start() {
  recallTheme();
  const shell = new Shell(document.getElementById('app'));
  const show = () => {
    const place = readPlace();
    if (place.run !== null && shell.view instanceof RunView && shell.view.id === place.run) {
      shell.view.turn(place);
      return;
    }
    const view = place.run === null ? new RunsView(shell, place) : new RunView(shell, place);
    const crumbs = place.run === null ? [] : [link('/', { text: 'Runs' }), make('span', { text: '/', 'aria-hidden': 'true' }), make('b', { text: place.run })];
    shell.show(view, crumbs);
  };
  shell.again = () => {
    shell.view.id = null; // so that the same run is begun anew
    show();
  };
  addEventListener('popstate', show);
  show();
}

start();
